// table.c - the layer table of one dtype.
#include "kernels/cuda/ops.h"

#define ENTRY(name) .name = OP(name),
const struct layers OP(layers) = {LAYER_OPS(ENTRY)};
