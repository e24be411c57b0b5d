// lt.c - the part of cuBLASLt that the project uses, on the CPU: functions of the same names.
//
// Column-major products of fp32 or bf16 operands, summed in fp32 in the order of k, with the
// epilogues DEFAULT, BIAS, GELU_AUX_BIAS, DGELU and BGRADB. Whatever else is asked for is
// NOT_SUPPORTED, and so is what the real library would only catch on a bad day: addresses that are
// less aligned than the heuristic was told, an algorithm of another problem, reductions that may be
// split. A product is queued like a kernel of one thread, and touches what the real one may touch:
// the operands, column by column, and all of the workspace that its algorithm wants.
//
// The opaque structs of the library's header hold what is set here and nothing more.
#include "test/cuda/lt.h"

#include "kernels/bf16.h"
#include "test/cuda/sim.h"

#include <cublasLt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define min(a, b) ((a) < (b) ? (a) : (b))

// What every algorithm here wants: something that a caller who forgets the workspace misses.
#define WORKSPACE_BYTES ((size_t)4096)

struct layout {
    uint64_t rows, cols;
    int64_t ld;
    uint32_t type;
};

struct desc {
    uint32_t compute, scale, pointer_mode, ta, tb, epilogue;
    void *bias, *aux;
    int64_t aux_ld;
};

struct preference {
    uint64_t workspace;
    uint32_t reductions, alignment[4]; // of A, B, C, D
};

struct algo {
    uint64_t problem; // that it was found for
    uint32_t alignment[4], bias_alignment, aux_alignment;
};

_Static_assert(sizeof(struct layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "layout");
_Static_assert(sizeof(struct desc) <= sizeof(cublasLtMatmulDescOpaque_t), "desc");
_Static_assert(sizeof(struct preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "preference");
_Static_assert(sizeof(struct algo) <= sizeof(cublasLtMatmulAlgo_t), "algo");

static struct sim_lt_counts counts;
static uint32_t refused;

struct sim_lt_counts sim_lt_counts(void)
{
    return counts;
}

void sim_lt_refuse(uint32_t epilogue)
{
    refused = epilogue;
}

// ---- handles and descriptors --------------------------------------------------------------------

struct cublasLtContext {
    int unused;
};

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = calloc(1, sizeof **handle);
    counts.handles++;
    return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    if (!handle) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    free(handle);
    counts.handles--;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_SUCCESS ? "success" : "the CPU runtime's cuBLASLt refuses";
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    static const struct {
        cublasStatus_t status;
        const char *name;
    } names[] = {{CUBLAS_STATUS_SUCCESS, "CUBLAS_STATUS_SUCCESS"},
                 {CUBLAS_STATUS_NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED"},
                 {CUBLAS_STATUS_ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED"},
                 {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE"},
                 {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].status == status) {
            return names[i].name;
        }
    }
    return "CUBLAS_STATUS of another kind";
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t out, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld)
{
    if (size < sizeof *out || rows == 0 || cols == 0 || ld < (int64_t)rows) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    struct layout l = {rows, cols, ld, (uint32_t)type};
    memset(out, 0, sizeof *out);
    memcpy(out, &l, sizeof l);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t out, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale)
{
    if (size < sizeof *out) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    struct desc d = {.compute = (uint32_t)compute,
                     .scale = (uint32_t)scale,
                     .ta = CUBLAS_OP_N,
                     .tb = CUBLAS_OP_N,
                     .pointer_mode = CUBLASLT_POINTER_MODE_HOST,
                     .epilogue = CUBLASLT_EPILOGUE_DEFAULT};
    memset(out, 0, sizeof *out);
    memcpy(out, &d, sizeof d);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t out, size_t size)
{
    if (size < sizeof *out) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    struct preference p = {.reductions = CUBLASLT_REDUCTION_SCHEME_MASK,
                           .alignment = {256, 256, 256, 256}};
    memset(out, 0, sizeof *out);
    memcpy(out, &p, sizeof p);
    return CUBLAS_STATUS_SUCCESS;
}

// Sets a field of a struct that lies at the start of an opaque one.
static cublasStatus_t set(void *opaque, size_t offset, size_t size, const void *value, size_t bytes)
{
    if (bytes != size) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy((char *)opaque + offset, value, size);
    return CUBLAS_STATUS_SUCCESS;
}
#define SET(type, field)                                                                           \
    set(out, offsetof(struct type, field), sizeof((struct type *)0)->field, value, bytes)

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t out,
                                              cublasLtMatmulDescAttributes_t name,
                                              const void *value, size_t bytes)
{
    switch (name) {
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        return SET(desc, pointer_mode);
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return SET(desc, ta);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return SET(desc, tb);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return SET(desc, epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return SET(desc, bias);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return SET(desc, aux);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return SET(desc, aux_ld);
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t out,
                                                    cublasLtMatmulPreferenceAttributes_t name,
                                                    const void *value, size_t bytes)
{
    switch (name) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return SET(preference, workspace);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return SET(preference, reductions);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return SET(preference, alignment[0]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return SET(preference, alignment[1]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return SET(preference, alignment[2]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return SET(preference, alignment[3]);
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

// ---- what is supported --------------------------------------------------------------------------

// A product with all that decides its algorithm and its result.
struct problem {
    struct desc desc;
    struct layout a, b, c, d;
    size_t m, n, k;
};

static size_t type_bytes(uint32_t type)
{
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 0;
}

// Is p a multiple of bytes?
static bool aligned(const void *p, size_t bytes)
{
    return (uintptr_t)p % bytes == 0;
}

static uint32_t alignment_of(const void *p)
{
    return p ? (uint32_t)min((uintptr_t)p & (~(uintptr_t)p + 1), (uintptr_t)256) : 256;
}

static bool needs_bias(const struct desc *d)
{
    return d->epilogue == CUBLASLT_EPILOGUE_BIAS || d->epilogue == CUBLASLT_EPILOGUE_BGRADB ||
           d->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

static bool needs_aux(const struct desc *d)
{
    return d->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || d->epilogue == CUBLASLT_EPILOGUE_DGELU;
}

static bool supports(const struct problem *p)
{
    const struct desc *d = &p->desc;
    bool types = p->a.type == p->b.type && p->c.type == p->d.type && type_bytes(p->a.type) > 0 &&
                 (p->d.type == p->a.type || p->d.type == CUDA_R_32F);
    bool arithmetic = d->compute == CUBLAS_COMPUTE_32F && d->scale == CUDA_R_32F &&
                      d->pointer_mode == CUBLASLT_POINTER_MODE_HOST && d->ta <= CUBLAS_OP_T &&
                      d->tb <= CUBLAS_OP_T;
    bool epilogue = d->epilogue != refused &&
                    (d->epilogue == CUBLASLT_EPILOGUE_DEFAULT || needs_bias(d) || needs_aux(d));
    bool aux = !needs_aux(d) || (d->aux_ld % 8 == 0 && d->aux_ld >= (int64_t)p->m);
    return types && arithmetic && epilogue && aux;
}

// False: the operands do not fit together.
static bool read_problem(struct problem *p, const void *desc, const void *a, const void *b,
                         const void *c, const void *d)
{
    memset(p, 0, sizeof *p); // it is hashed, with its padding
    memcpy(&p->desc, desc, sizeof p->desc);
    memcpy(&p->a, a, sizeof p->a);
    memcpy(&p->b, b, sizeof p->b);
    memcpy(&p->c, c, sizeof p->c);
    memcpy(&p->d, d, sizeof p->d);
    bool ta = p->desc.ta == CUBLAS_OP_T, tb = p->desc.tb == CUBLAS_OP_T;
    p->m = p->d.rows;
    p->n = p->d.cols;
    p->k = ta ? p->a.rows : p->a.cols;
    return (ta ? p->a.cols : p->a.rows) == p->m && (tb ? p->b.rows : p->b.cols) == p->n &&
           (tb ? p->b.cols : p->b.rows) == p->k && p->c.rows == p->m && p->c.cols == p->n;
}

// Of all but the addresses.
static uint64_t hash(const struct problem *problem)
{
    struct problem p = *problem;
    p.desc.bias = p.desc.aux = NULL;
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof p; i++) {
        h = (h ^ ((const unsigned char *)&p)[i]) * 0x100000001b3u;
    }
    return h;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t results[], int *n)
{
    struct problem p;
    struct preference pref;
    counts.heuristics++;
    *n = 0;
    if (!handle || asked < 1 || !read_problem(&p, desc, a, b, c, d)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(&pref, preference, sizeof pref);
    if (!supports(&p) || pref.workspace < WORKSPACE_BYTES ||
        pref.reductions != CUBLASLT_REDUCTION_SCHEME_NONE) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    struct algo algo = {.problem = hash(&p),
                        .bias_alignment = alignment_of(p.desc.bias),
                        .aux_alignment = alignment_of(p.desc.aux)};
    memcpy(algo.alignment, pref.alignment, sizeof algo.alignment);
    memset(results, 0, sizeof *results);
    memcpy(&results->algo, &algo, sizeof algo);
    results->workspaceSize = WORKSPACE_BYTES;
    results->state = CUBLAS_STATUS_SUCCESS;
    *n = 1;
    return CUBLAS_STATUS_SUCCESS;
}

// ---- a product ----------------------------------------------------------------------------------

struct product {
    struct problem p;
    float alpha, beta;
    const void *a, *b, *c;
    void *d, *workspace;
};

static float load(const void *x, uint32_t type, size_t i)
{
    return type == CUDA_R_32F ? ((const float *)x)[i] : bf16_load(((const uint16_t *)x)[i]);
}

static void store(void *x, uint32_t type, size_t i, float value)
{
    if (type == CUDA_R_32F) {
        ((float *)x)[i] = value;
    } else {
        ((uint16_t *)x)[i] = bf16_round(value);
    }
}

static void touch(const void *x, const struct layout *l, bool write)
{
    size_t bytes = type_bytes(l->type);
    if ((uint64_t)l->ld == l->rows) {
        sim_touch(x, l->rows * l->cols * bytes, write);
        return;
    }
    for (size_t j = 0; j < l->cols; j++) {
        sim_touch((const char *)x + j * (size_t)l->ld * bytes, l->rows * bytes, write);
    }
}

static void touch_all(const struct product *x)
{
    const struct problem *p = &x->p;
    const struct desc *d = &p->desc;
    touch(x->a, &p->a, false);
    touch(x->b, &p->b, false);
    if (x->beta != 0) {
        touch(x->c, &p->c, false);
    }
    if (needs_bias(d)) {
        bool gradient = d->epilogue == CUBLASLT_EPILOGUE_BGRADB;
        sim_touch(d->bias, (gradient ? p->n : p->m) * type_bytes(p->d.type), gradient);
    }
    if (needs_aux(d)) {
        struct layout aux = p->d;
        aux.ld = d->aux_ld;
        touch(d->aux, &aux, d->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
    }
    sim_touch(x->workspace, WORKSPACE_BYTES, true);
    touch(x->d, &p->d, true);
}

// A block of D: BM x BN, its sums over BK at a time, from operands widened to fp32 in step of k:
// a is (BK,BM), b is (BK,BN). Static: a kernel's stack is small, and one runs at a time.
#define BM ((size_t)64)
#define BN ((size_t)64)
#define BK ((size_t)256)
static float block_a[BK * BM], block_b[BK * BN], sums[BN * BM];

// out[p*width + i] = element (i, p) of x, which is stored by p if `across` and by i else; 0 beyond
// its end.
static void widen(float *out, size_t width, const void *x, const struct layout *l, bool across,
                  size_t i0, size_t n, size_t p0, size_t k)
{
    size_t ld = (size_t)l->ld;
    memset(out, 0, k * width * sizeof *out);
    if (across) {
        for (size_t p = 0; p < k; p++) {
            for (size_t i = 0; i < n; i++) {
                out[p * width + i] = load(x, l->type, (p0 + p) * ld + i0 + i);
            }
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            for (size_t p = 0; p < k; p++) {
                out[p * width + i] = load(x, l->type, (i0 + i) * ld + p0 + p);
            }
        }
    }
}

// sums += a b, each in the order of k; 16 x 4 of them in registers. The same bits in every
// instruction set: products and sums are rounded apart.
typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));

static inline __attribute__((always_inline)) void multiply(size_t k)
{
    for (size_t j = 0; j < BN; j += 4) {
        for (size_t i = 0; i < BM; i += 16) {
            lanes *c0 = (lanes *)(sums + j * BM + i), *c1 = (lanes *)((float *)c0 + BM);
            lanes *c2 = (lanes *)((float *)c1 + BM), *c3 = (lanes *)((float *)c2 + BM);
            lanes s0 = *c0, s1 = *c1, s2 = *c2, s3 = *c3;
            for (size_t p = 0; p < k; p++) {
                lanes a = *(const lanes *)(block_a + p * BM + i);
                const float *b = block_b + p * BN + j;
                s0 += a * b[0];
                s1 += a * b[1];
                s2 += a * b[2];
                s3 += a * b[3];
            }
            *c0 = s0;
            *c1 = s1;
            *c2 = s2;
            *c3 = s3;
        }
    }
}

#ifdef __x86_64__
__attribute__((target("avx512f"))) static void multiply_avx512(size_t k)
{
    multiply(k);
}
__attribute__((target("avx2"))) static void multiply_avx2(size_t k)
{
    multiply(k);
}
#endif

static void multiply_blocks(size_t k)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f")) {
        multiply_avx512(k);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        multiply_avx2(k);
        return;
    }
#endif
    multiply(k);
}

#define SQRT_2_PI 0.7978845608f

static float gelu(float x)
{
    return 0.5f * x * (1 + tanhf(SQRT_2_PI * (x + 0.044715f * x * x * x)));
}

static float gelu_slope(float x)
{
    float t = tanhf(SQRT_2_PI * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * SQRT_2_PI * (1 + 3 * 0.044715f * x * x);
}

// What follows the sum of element (i, j).
static void finish(const struct product *x, size_t i, size_t j, float sum)
{
    const struct problem *p = &x->p;
    const struct desc *d = &p->desc;
    size_t at_aux = j * (size_t)d->aux_ld + i;
    float value = x->alpha * sum;
    if (x->beta != 0) {
        value += x->beta * load(x->c, p->c.type, j * (size_t)p->c.ld + i);
    }
    if (needs_bias(d) && d->epilogue != CUBLASLT_EPILOGUE_BGRADB) {
        value += load(d->bias, p->d.type, i);
    }
    if (d->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
        store(d->aux, p->d.type, at_aux, value);
        value = gelu(value);
    } else if (d->epilogue == CUBLASLT_EPILOGUE_DGELU) {
        value *= gelu_slope(load(d->aux, p->d.type, at_aux));
    }
    store(x->d, p->d.type, j * (size_t)p->d.ld + i, value);
}

static void bias_gradient(const struct product *x)
{
    const struct problem *p = &x->p;
    bool tb = p->desc.tb == CUBLAS_OP_T;
    for (size_t j = 0; j < p->n; j++) {
        float sum = 0;
        for (size_t k = 0; k < p->k; k++) {
            size_t ld = (size_t)p->b.ld;
            sum += load(x->b, p->b.type, tb ? k * ld + j : j * ld + k);
        }
        store(p->desc.bias, p->d.type, j, sum);
    }
}

static void run(void *args)
{
    const struct product *x = args;
    const struct problem *p = &x->p;
    bool ta = p->desc.ta == CUBLAS_OP_T, tb = p->desc.tb == CUBLAS_OP_T;
    touch_all(x);
    for (size_t j = 0; j < p->n; j += BN) {
        for (size_t i = 0; i < p->m; i += BM) {
            size_t n = min(BN, p->n - j), m = min(BM, p->m - i);
            memset(sums, 0, sizeof sums);
            for (size_t at = 0; at < p->k; at += BK) {
                size_t k = min(BK, p->k - at);
                widen(block_a, BM, x->a, &p->a, !ta, i, m, at, k);
                widen(block_b, BN, x->b, &p->b, tb, j, n, at, k);
                multiply_blocks(k);
            }
            for (size_t jj = 0; jj < n; jj++) {
                for (size_t ii = 0; ii < m; ii++) {
                    finish(x, i + ii, j + jj, sums[jj * BM + ii]);
                }
            }
        }
    }
    if (p->desc.epilogue == CUBLASLT_EPILOGUE_BGRADB) {
        bias_gradient(x);
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t *chosen, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    struct product x = {.a = a, .b = b, .c = c, .d = d, .workspace = workspace};
    struct algo algo;
    if (!handle || !alpha || !beta || !chosen || !a || !b || !c || !d ||
        !read_problem(&x.p, desc, la, lb, lc, ld)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(&x.alpha, alpha, sizeof x.alpha);
    memcpy(&x.beta, beta, sizeof x.beta);
    memcpy(&algo, chosen, sizeof algo);
    const struct desc *p = &x.p.desc;
    if (!workspace || workspace_bytes < WORKSPACE_BYTES || algo.problem != hash(&x.p) ||
        (needs_bias(p) && !p->bias) || (needs_aux(p) && !p->aux)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (!aligned(a, algo.alignment[0]) || !aligned(b, algo.alignment[1]) ||
        !aligned(c, algo.alignment[2]) || !aligned(d, algo.alignment[3]) ||
        !aligned(workspace, 256) || (needs_bias(p) && !aligned(p->bias, algo.bias_alignment)) ||
        (needs_aux(p) && !aligned(p->aux, algo.aux_alignment))) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    struct sim_kernel kernel = {.name = "cublasLtMatmul",
                                .grid = {1, 1, 1},
                                .block = {1, 1, 1},
                                .call = run,
                                .args = malloc(sizeof x),
                                .release = free};
    if (!kernel.args) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    memcpy(kernel.args, &x, sizeof x);
    counts.products++;
    sim_launch(&kernel, stream);
    return CUBLAS_STATUS_SUCCESS;
}
