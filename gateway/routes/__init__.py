"""The server's routes: thin handlers, one module a subject."""
