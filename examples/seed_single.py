import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed.fsdp import fully_shard

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
model = fully_shard(model)
print(type(model).__name__)            # SequentialFSDPModule

out = model(tp.randn(2, 4))            # hooks all-gather for the forward
print(tuple(out.shape))                # (2, 4)

opt = tp.optim.SGD(model.parameters(), lr=0.1)
out.sum().backward()
opt.step()

try:
    fully_shard(model)
except RuntimeError as e:
    print(e)                           # fully_shard has already been applied
