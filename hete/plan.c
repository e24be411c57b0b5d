#include "hete/plan.h"

#include <stdio.h>

void plan_resident(struct plan *plan, const struct model *model, size_t B, size_t T,
                   size_t micro_batches, bool hold_updates)
{
    *plan = (struct plan){.policy = "resident",
                          .units = model->units,
                          .B = B,
                          .T = T,
                          .micro_batches = micro_batches,
                          .hold_updates = hold_updates,
                          .grad_buffers = micro_batches > 1,
                          .slices = 1};
}
