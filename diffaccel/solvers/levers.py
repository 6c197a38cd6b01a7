"""What can hold the place "solver"."""

from ..core.place import Lever, Place
from ..core.slots import Slot

PLACE = Place("solver", Slot.CALL, 3, {"abm": Lever("solvers.config", "AbmSolver")}, prefix="solver_")
