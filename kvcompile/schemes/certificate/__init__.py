"""Certificates of any bounded scheme: the bounds, the budgets and checks, and the plane that results are added to."""
