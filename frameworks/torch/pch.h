// Precompiled for the sources that see LibTorch: <torch/torch.h> takes about 20 s to parse.
#include <torch/torch.h>
