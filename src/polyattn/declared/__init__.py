"""What this package's own backends declare; importing it imports no framework."""
