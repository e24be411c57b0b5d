// cost.c - from the costs of a machine to the work of each operation.
#include "hete/cost.h"
#include "hete/plan.h"

#include <math.h>

static double seconds_on_host(const struct costs *costs, uint16_t kind)
{
    switch (kind) {
    case OP_HOST_ACCUMULATE:
        return costs->host_accumulate;
    case OP_HOST_NORM:
        return costs->host_norm;
    case OP_HOST_SPECULATE:
        return costs->host_speculate;
    default:
        return costs->host_adam;
    }
}

// The part of a unit that an operation works on: n of its elements.
static double part_of(const struct step_shape *shape, const struct op *op, size_t n)
{
    return (double)n / (double)model_unit(shape->model, op->unit)->params;
}

static double seconds_on_device(const struct costs *costs, double seconds)
{
    return seconds > 0 ? fmax(seconds, costs->least) : 0;
}

static double work_of(const struct costs *costs, const struct step_shape *shape,
                      const struct plan *plan, const struct op *op)
{
    size_t first, k = op->unit > 0;
    double held = op_has_unit(op->kind) ? part_of(shape, op, step_held(shape, plan, op->unit)) : 1;
    if (op->kind < CALLS) {
        return seconds_on_device(costs, costs->call[op->kind][k]);
    }
    if (op->kind == OP_HOST_ADAM && plan->speculate) {
        return 0; // what was written beforehand is right, nearly always
    }
    switch (op->kind) {
    case OP_TOKENS_IN:
        return (double)(2 * shape->B * shape->T * sizeof(int32_t));
    case OP_LOSSES_OUT:
        return (double)(shape->B * shape->T * sizeof(float));
    case OP_FETCH:
    case OP_GRAD_OUT:
        return (double)(step_slice(shape, plan, op->unit, op->slice, &first) *
                        dtype_bytes(shape->dtype));
    case OP_ACCUMULATE:
        return seconds_on_device(costs, costs->accumulate[k] * held);
    case OP_NORM: // of a rank's piece, also where it has the whole gradient
        return seconds_on_device(costs, costs->norm[k] / (double)shape->ranks);
    case OP_CLIP:
        return seconds_on_device(costs, costs->clip);
    case OP_ADAM:
        return seconds_on_device(costs, costs->adam[k] * held);
    case OP_SCATTER:
        return seconds_on_device(costs, costs->scatter[k]);
    case OP_GATHER_GRADS:
    case OP_GATHER:
        return seconds_on_device(costs, costs->gather[k]);
    case OP_SHARE:
        return seconds_on_device(costs, costs->share);
    case OP_HOST_ACCUMULATE:
    case OP_HOST_NORM:
    case OP_HOST_SPECULATE:
    case OP_HOST_ADAM:
        return (double)step_slice(shape, plan, op->unit, op->slice, &first) *
               seconds_on_host(costs, op->kind);
    default:
        return 0; // only waits
    }
}

void costs_of_graph(const struct costs *costs, const struct step_shape *shape,
                    const struct plan *plan, const struct graph *graph, double *work)
{
    for (size_t i = 0; i < graph->n_ops; i++) {
        work[i] = work_of(costs, shape, plan, graph->ops + i);
    }
}

double cost_alone(const struct costs *costs, const struct op *op, double work)
{
    const struct device_link *link = &costs->link;
    if (op->lane != LANE_COPY_IN && op->lane != LANE_COPY_OUT) {
        return work;
    }
    double rate = op->lane == LANE_COPY_IN ? link->in : link->out;
    return link->latency_s + (rate > 0 ? work / rate : 0);
}
