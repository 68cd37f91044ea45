"""Whether offload is right, and as fast as its plan says: models, schedules, and a real disk."""
