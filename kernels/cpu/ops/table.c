// table.c - the layer table of one variant.
#include "kernels/cpu/ops/ops.h"

#define DECLARE(name) extern __typeof__(*((struct layers *)0)->name) OP(name);
LAYER_OPS(DECLARE)

#define ENTRY(name) .name = OP(name),
const struct layers OP(layers) = {LAYER_OPS(ENTRY)};
