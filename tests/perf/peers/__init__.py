"""What others deploy with, doing the small job of one server beside us."""
