"""How far work that takes long has come: counted, and put into words."""
