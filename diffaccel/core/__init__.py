"""The ground every accelerator stands on: protocol, rules, hooks, runs, reports."""
