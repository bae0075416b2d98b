"""The plans that calls on a GPU leave behind, for tests that look at them or want none."""

from fa_cupy.core import plan_cache
from fa_cupy.gpu import attention_backward
from fa_cupy.gpu.kernels import attention_backward as kernels_of_gradients


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


def gradients_by_products(monkeypatch):
    """Products of cuBLAS answer the following calls for gradients."""
    forget()
    monkeypatch.setattr(attention_backward, "prepared", lambda *args: None)


def gradients_without_sm90(monkeypatch):
    """Kernels that any device has answer the following calls for gradients."""
    forget()
    select = kernels_of_gradients.select

    def unmapped(wanted, target):
        return select(wanted._replace(mapped=False), target)

    monkeypatch.setattr(kernels_of_gradients, "select", unmapped)
