#include "kernels/cuda/lt.h"

#include "kernels/clock.h"
#include "kernels/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define min(a, b) ((a) < (b) ? (a) : (b))
#define TRY(call)                                                                                  \
    do {                                                                                           \
        cublasStatus_t status_ = (call);                                                           \
        if (status_ != CUBLAS_STATUS_SUCCESS) {                                                    \
            return status_;                                                                        \
        }                                                                                          \
    } while (0)

// ---- a plan -------------------------------------------------------------------------------------

// An operand as it is stored: column-major, rows x cols, no gaps.
struct matrix {
    size_t rows, cols;
    cudaDataType type;
};

// What a product's operands are to cuBLASLt.
struct product {
    struct matrix a, b, d;
    bool ta, tb;
};

static struct product product_of(const struct lt_shape *s, cudaDataType type)
{
    size_t N = s->N, C = s->C, OC = s->OC;
    struct matrix inp = {C, N, type}, dout = {OC, N, type}, weight = {C, OC, type};
    switch (s->op) {
    case LT_FORWARD:
        return (struct product){.a = weight, .b = inp, .d = dout, .ta = true};
    case LT_INPUT:
        return (struct product){.a = weight, .b = dout, .d = inp};
    case LT_WEIGHT_FP32:
        weight.type = CUDA_R_32F;
        break;
    case LT_WEIGHT:
        break;
    }
    return (struct product){.a = inp, .b = dout, .d = weight, .tb = true};
}

static size_t type_bytes(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : 2;
}

// What every address of a matrix or vector of the model is a multiple of: tensors of a unit start
// at multiples of so many elements, all else at larger ones.
static uint32_t tensor_alignment(cudaDataType type)
{
    return (uint32_t)(TENSOR_ALIGN * type_bytes(type));
}

// The same for a matrix that may begin at any row of a tensor, as a chunk of the head's rows does.
static uint32_t row_alignment(const struct matrix *m)
{
    size_t row = m->rows * type_bytes(m->type), power = row & (~row + 1);
    return (uint32_t)min(power, tensor_alignment(m->type));
}

static cublasStatus_t set_desc(struct lt_plan *p, cublasLtMatmulDescAttributes_t name,
                               const void *value, size_t bytes)
{
    return cublasLtMatmulDescSetAttribute(&p->desc, name, value, bytes);
}

static cublasStatus_t init_layout(cublasLtMatrixLayoutOpaque_t *layout, const struct matrix *m)
{
    return cublasLtMatrixLayoutInit(layout, m->type, m->rows, m->cols, (int64_t)m->rows);
}

static bool has_bias(cublasLtEpilogue_t e)
{
    return e == CUBLASLT_EPILOGUE_BIAS || e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           e == CUBLASLT_EPILOGUE_BGRADB;
}

static bool has_aux(cublasLtEpilogue_t e)
{
    return e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || e == CUBLASLT_EPILOGUE_DGELU;
}

static cublasStatus_t set_pointers(struct lt_plan *p, const void *bias, const void *aux)
{
    if (has_bias(p->shape.epilogue)) {
        TRY(set_desc(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    }
    if (has_aux(p->shape.epilogue)) {
        TRY(set_desc(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux));
    }
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t describe(struct lt_plan *p, const struct product *x)
{
    const int32_t transpose = CUBLAS_OP_T, host = CUBLASLT_POINTER_MODE_HOST;
    const uint32_t epilogue = p->shape.epilogue;
    const int64_t ld = (int64_t)x->d.rows;
    TRY(cublasLtMatmulDescInit(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    TRY(set_desc(p, CUBLASLT_MATMUL_DESC_POINTER_MODE, &host, sizeof host));
    if (x->ta) {
        TRY(set_desc(p, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose));
    }
    if (x->tb) {
        TRY(set_desc(p, CUBLASLT_MATMUL_DESC_TRANSB, &transpose, sizeof transpose));
    }
    TRY(set_desc(p, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (has_aux(p->shape.epilogue)) {
        TRY(set_desc(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld, sizeof ld));
    }
    // The heuristic looks at the alignment of these addresses, and at nothing else of them.
    TRY(set_pointers(p, (const void *)(uintptr_t)tensor_alignment(x->d.type),
                     (const void *)(uintptr_t)row_alignment(&x->d)));
    TRY(init_layout(&p->a, &x->a));
    TRY(init_layout(&p->b, &x->b));
    return init_layout(&p->d, &x->d);
}

static cublasStatus_t prefer(cublasLtMatmulPreferenceOpaque_t *pref, const struct product *x)
{
    const uint64_t workspace = CUDA_LT_BYTES;
    const uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        uint32_t bytes;
    } alignment[] = {{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, row_alignment(&x->a)},
                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, row_alignment(&x->b)},
                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, row_alignment(&x->d)},
                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, row_alignment(&x->d)}};
    TRY(cublasLtMatmulPreferenceInit(pref));
    TRY(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &workspace, sizeof workspace));
    TRY(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                             &none, sizeof none));
    for (size_t i = 0; i < sizeof alignment / sizeof *alignment; i++) {
        TRY(cublasLtMatmulPreferenceSetAttribute(pref, alignment[i].name, &alignment[i].bytes,
                                                 sizeof alignment[i].bytes));
    }
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t make_plan(struct cuda *cuda, struct lt_plan *p)
{
    cudaDataType type = cuda->base.dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    struct product x = product_of(&p->shape, type);
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t found = {.state = CUBLAS_STATUS_NOT_SUPPORTED};
    int n = 0;
    TRY(describe(p, &x));
    TRY(prefer(&pref, &x));
    TRY(cublasLtMatmulAlgoGetHeuristic(cuda->lt, &p->desc, &p->a, &p->b, &p->d, &p->d, &pref, 1,
                                       &found, &n));
    if (n == 0) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    p->algo = found.algo;
    return found.state;
}

// ---- the table ----------------------------------------------------------------------------------

static bool same_shape(const struct lt_shape *a, const struct lt_shape *b)
{
    return a->op == b->op && a->epilogue == b->epilogue && a->N == b->N && a->C == b->C &&
           a->OC == b->OC;
}

static size_t hash(const struct lt_shape *s)
{
    uint64_t h = (uint64_t)s->op * 1024 + (uint64_t)s->epilogue;
    h = (h * 0x9e3779b97f4a7c15u) ^ s->N;
    h = (h * 0x9e3779b97f4a7c15u) ^ s->C;
    h = (h * 0x9e3779b97f4a7c15u) ^ s->OC;
    h *= 0x9e3779b97f4a7c15u;
    return (size_t)(h >> 32) % LT_PLANS;
}

static struct lt_plan *slot_of(struct lt_cache *cache, const struct lt_shape *shape)
{
    size_t i = hash(shape);
    while (cache->plan[i].made && !same_shape(&cache->plan[i].shape, shape)) {
        i = (i + 1) % LT_PLANS;
    }
    return &cache->plan[i];
}

static struct lt_plan *plan_of(struct cuda *cuda, const struct lt_shape *shape)
{
    struct lt_cache *cache = cuda->plans;
    struct lt_plan *p = slot_of(cache, shape);
    if (!p->made) {
        if (cache->n >= LT_PLANS * 3 / 4) { // full enough for searches to be long
            memset(cache->plan, 0, sizeof cache->plan);
            cache->n = 0;
            p = slot_of(cache, shape);
        }
        cache->n++;
        p->shape = *shape;
        p->made = true;
        p->status = make_plan(cuda, p);
    }
    return p;
}

bool lt_has(struct device *dev, const struct lt_shape *shape)
{
    return plan_of(cuda_of(dev), shape)->status == CUBLAS_STATUS_SUCCESS;
}

static void fail(struct device *dev, const char *call, const struct lt_shape *s,
                 cublasStatus_t status)
{
    static const char *const ops[] = {"forward", "gradient of the input", "gradient of the weight",
                                      "fp32 gradient of the weight"};
    char why[256];
    snprintf(why, sizeof why, "%s, %s (%s, N %zu, C %zu, OC %zu, epilogue %d, %s)",
             cublasLtGetStatusName(status), cublasLtGetStatusString(status), ops[s->op], s->N, s->C,
             s->OC, (int)s->epilogue, dev->dtype == DTYPE_BF16 ? "bf16" : "fp32");
    cuda_fail(dev, call, why);
}

void lt_matmul(struct device *dev, const struct lt_shape *shape, const struct lt_operands *o)
{
    struct cuda *cuda = cuda_of(dev);
    struct lt_plan *p = plan_of(cuda, shape);
    const float alpha = 1, beta = o->c ? 1 : 0;
    if (p->status != CUBLAS_STATUS_SUCCESS) {
        fail(dev, "cublasLtMatmulAlgoGetHeuristic", shape, p->status);
        return;
    }
    cublasStatus_t status = set_pointers(p, o->bias, o->aux);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmul(cuda->lt, &p->desc, &alpha, o->a, &p->a, o->b, &p->b, &beta,
                                o->c ? o->c : o->d, &p->d, o->d, &p->d, &p->algo,
                                cuda->lt_workspace, CUDA_LT_BYTES, cuda_stream(dev));
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        fail(dev, "cublasLtMatmul", shape, status);
    }
}

// ---- open, close --------------------------------------------------------------------------------

int lt_open(struct cuda *cuda, struct error *err)
{
    int device = 0, major = 0;
    cublasStatus_t status = cublasLtCreate(&cuda->lt);
    if (status != CUBLAS_STATUS_SUCCESS) {
        cuda->lt = NULL;
        return error_set(err, STATUS_FAIL, "cublasLtCreate: %s; is the GPU's memory in use?",
                         cublasLtGetStatusString(status));
    }
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess) {
        code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (code != cudaSuccess) {
        return error_set(err, STATUS_FAIL, "cudaDeviceGetAttribute: %s", cudaGetErrorString(code));
    }
    cuda->plans = calloc(1, sizeof *cuda->plans);
    if (!cuda->plans) {
        return error_set(err, STATUS_FAIL, "no memory for %zu bytes of plans of matrix products",
                         sizeof *cuda->plans);
    }
    // fp32: nobody says how exact cuBLASLt's GELU is, and ours is. Before sm_90 its GELU is known
    // to be slower than a pass of its own.
    cuda->plans->fuse = cuda->base.dtype == DTYPE_BF16 && major >= 9;
    return STATUS_OK;
}

void lt_close(struct cuda *cuda)
{
    free(cuda->plans);
    cuda->plans = NULL;
    if (cuda->lt) {
        cublasLtDestroy(cuda->lt);
        cuda->lt = NULL;
    }
}

// ---- rate ---------------------------------------------------------------------------------------

// Numbers of both signs and many sizes: a GPU multiplies constants faster, on less power.
static cudaError_t fill(char *device, size_t bytes, enum dtype dtype)
{
    static uint32_t host[1 << 14];
    uint32_t x = 1;
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
        x = x * 1664525 + 1013904223;
        // Sign and mantissa at random, magnitudes from 1/2 to 2; in 16 bits, two in a word.
        host[i] =
            dtype == DTYPE_FP32 ? (x & 0x80ffffffu) | 0x3f000000u : (x & 0x80ff80ffu) | 0x3f003f00u;
    }
    cudaError_t code = cudaSuccess;
    for (size_t at = 0; at < bytes && code == cudaSuccess; at += sizeof host) {
        code = cudaMemcpy(device + at, host, min(sizeof host, bytes - at), cudaMemcpyHostToDevice);
    }
    // Copies return when the host's memory is free again; they need not be done.
    return code == cudaSuccess ? cudaDeviceSynchronize() : code;
}

// Seconds of the fastest of several products, for at most about a quarter of a second.
static double best_product(struct cuda *cuda, const struct lt_shape *shape,
                           const struct lt_operands *o, cudaEvent_t from, cudaEvent_t to)
{
    double best = 0, start = clock_s();
    for (int try = 0; try < 20 && (try < 1 || clock_s() - start < 0.25); try++) {
        struct device *dev = &cuda->base;
        float ms = 0;
        if (!cuda_ok(dev, "cudaEventRecord", cudaEventRecord(from, cuda->current))) {
            return 0;
        }
        lt_matmul(dev, shape, o);
        if (!cuda_ok(dev, "cudaEventRecord", cudaEventRecord(to, cuda->current)) ||
            !cuda_ok(dev, "cudaEventSynchronize", cudaEventSynchronize(to)) ||
            !cuda_ok(dev, "cudaEventElapsedTime", cudaEventElapsedTime(&ms, from, to))) {
            return 0;
        }
        best = try == 0 || (double)ms * 1e-3 < best ? (double)ms * 1e-3 : best;
    }
    return best;
}

double lt_rate(struct cuda *cuda, size_t n)
{
    size_t bytes;
    char *x = NULL;
    // Memory of its own, which may be scarce: the arena may have taken what there is.
    for (;; n /= 2) {
        bytes = device_round(n * n * dtype_bytes(cuda->base.dtype));
        cudaError_t code = cudaMalloc((void **)&x, 3 * bytes + CUDA_LT_BYTES);
        if (code == cudaSuccess) {
            break;
        }
        cudaGetLastError(); // it is dealt with here
        if (code != cudaErrorMemoryAllocation || n <= 256) {
            return 0;
        }
    }
    void *workspace = cuda->lt_workspace;
    cudaEvent_t from = NULL, to = NULL;
    double seconds = 0;
    if (cuda_ok(&cuda->base, "cudaMemcpy", fill(x, 2 * bytes, cuda->base.dtype)) &&
        cuda_ok(&cuda->base, "cudaEventCreate", cudaEventCreate(&from)) &&
        cuda_ok(&cuda->base, "cudaEventCreate", cudaEventCreate(&to))) {
        struct lt_shape shape = {LT_FORWARD, CUBLASLT_EPILOGUE_DEFAULT, n, n, n};
        struct lt_operands o = {.d = x + 2 * bytes, .a = x, .b = x + bytes};
        cuda->lt_workspace = x + 3 * bytes; // there may be no arena yet
        seconds = best_product(cuda, &shape, &o, from, to);
        cuda->lt_workspace = workspace;
    }
    if (from) {
        cudaEventDestroy(from);
    }
    if (to) {
        cudaEventDestroy(to);
    }
    cudaFree(x);
    return seconds > 0 ? 2.0 * (double)n * (double)n * (double)n / seconds : 0;
}
