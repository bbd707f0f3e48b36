from .affinity import check_affinity as check_affinity
from .contract import ContractError as ContractError
from .fidelity import check_fidelity as check_fidelity
from .flow import check_flow as check_flow
from .integrator import check_integrator as check_integrator
from .kernel import check_kernel as check_kernel
