"""Calling: the implementations under judgement, the processes and devices they run on, and what a call costs."""
