"""What pages are made with: text that stays text, one document without network, one file."""
