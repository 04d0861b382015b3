"""An engine of one's own for offline batches: the three services as child processes of a Python program.

with Engine(model="path/to/checkpoint") as engine:
    for completion in engine.generate(["Once upon a time", "The sky is"], max_tokens=32):
        print(completion.text)
"""

from triptych_client.local.engine import BatchArgs, ChatArgs, Engine, GenerateArgs
from triptych_client.local.process import EngineError

__all__ = ["BatchArgs", "ChatArgs", "Engine", "EngineError", "GenerateArgs"]
