"""Will it run there, and how fast?  `kt.plan` and `ktgraph plan`, from a config alone."""

from ktgraph.planner.forecast import Forecast, FromDisk, Phase
from ktgraph.planner.holdings import Holding
from ktgraph.planner.model_plan import ModelPlan, plan
from ktgraph.planner.what_if import WhatIfError

__all__ = ["Forecast", "FromDisk", "Holding", "ModelPlan", "Phase", "WhatIfError", "plan"]
