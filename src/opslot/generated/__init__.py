"""Generated modeling modules: `from opslot.generated.qwen3 import Qwen3ForCausalLM`.

Each is made on first import from the installed Transformers and the patch of that architecture.
"""

from opslot.patchgen.hook import install

install()
