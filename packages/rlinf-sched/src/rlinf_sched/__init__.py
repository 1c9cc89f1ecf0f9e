"""Scheduling of RLinf: profiles, cost models, planner and simulator. Plain data in and out, neither ray nor torch."""

from rlinf_sched.costmodel import Cost, FormulaCost, Memory, StreamCost, TableCost
from rlinf_sched.explain import Explanation, explain
from rlinf_sched.export import to_plan
from rlinf_sched.fit import fit
from rlinf_sched.graph import Cycle, Graph, GraphError, SchedError, Stage
from rlinf_sched.planner import Candidate, Plan, plan
from rlinf_sched.predict import predict
from rlinf_sched.problem import Problem
from rlinf_sched.profile import Profile, ProfileError, ProfileSample, StepSample, Summary
from rlinf_sched.replan import Replanner
from rlinf_sched.simulator import Run, simulate

__all__ = [
    "Candidate",
    "Cost",
    "Cycle",
    "Explanation",
    "FormulaCost",
    "Graph",
    "GraphError",
    "Memory",
    "Plan",
    "Problem",
    "Profile",
    "ProfileError",
    "ProfileSample",
    "Replanner",
    "Run",
    "SchedError",
    "Stage",
    "StepSample",
    "StreamCost",
    "Summary",
    "TableCost",
    "explain",
    "fit",
    "plan",
    "predict",
    "simulate",
    "to_plan",
]
