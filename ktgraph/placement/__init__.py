"""Placement: prices on each device, units of weights under memory budgets, rules, reports."""
