"""A query on a traced graph."""


def ancestors(of):
    found, left = set(), [of]
    while left:
        operation = left.pop()
        new = {*(each.op for each in operation.inputs), *operation.control_inputs} - found
        found |= new
        left += new
    return found
