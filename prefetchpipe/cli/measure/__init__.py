"""What the commands measure; nothing here prints."""
