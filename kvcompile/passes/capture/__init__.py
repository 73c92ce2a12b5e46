"""Capture: from Dynamo's graph to ATen, sizes symbolic, in the forms that recognisers read."""
