"""What an inventory is read from: a module for each kind of file."""
