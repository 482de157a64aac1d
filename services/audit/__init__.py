"""`kvrelay audit`: whether everything that is held has a live owner."""
