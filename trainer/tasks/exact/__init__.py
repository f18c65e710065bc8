"""What an evaluation measures, in double precision, and how sure it is of that."""
