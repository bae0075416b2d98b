"""The plans that calls on a GPU leave behind, for tests that look at them or want none."""

from fa_cupy.gpu import plan_cache


def forget():
    """The next call of each kind makes its plan anew."""
    plan_cache.plans.clear()


def of(function="attention"):
    """Return the plans of a function, each of them once; None for calls that have none."""
    found = {}
    for key, value in plan_cache.plans.items():
        if key[0] == function:
            plan = getattr(value, "plan", value)
            found[id(plan)] = plan
    return list(found.values())


def steps(function="attention"):
    """Return the steps of all plans of a function, those of fallbacks that were needed."""
    plans = (plan.other or plan for plan in of(function) if plan is not None)
    return [step for plan in plans for step in plan.steps]


def kernels(function="attention"):
    """Return the sources of all these steps."""
    return [step.variant.source for step in steps(function)]
