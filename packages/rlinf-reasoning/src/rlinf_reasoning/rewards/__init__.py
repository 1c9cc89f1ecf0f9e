"""Rewards: plain functions of (text, answer, fields), and the pool of killable processes that runs them."""
