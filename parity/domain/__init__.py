"""Domains: the fields of cases, contracts, and how cases are drawn."""
