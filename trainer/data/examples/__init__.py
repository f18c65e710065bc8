"""The values of one example: encoded images, sequences of variable length, and `data.map`."""
