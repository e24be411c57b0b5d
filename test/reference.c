#include "test/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void ref_encoder_forward(double *out, const int32_t *tokens, const double *wte, const double *wpe,
                         size_t B, size_t T, size_t C)
{
    for (size_t r = 0; r < B * T; r++) {
        for (size_t c = 0; c < C; c++) {
            out[r * C + c] = wte[(size_t)tokens[r] * C + c] + wpe[r % T * C + c];
        }
    }
}

void ref_encoder_backward(double *dwte, double *dwpe, const double *dout, const int32_t *tokens,
                          size_t B, size_t T, size_t C)
{
    for (size_t r = 0; r < B * T; r++) {
        for (size_t c = 0; c < C; c++) {
            dwte[(size_t)tokens[r] * C + c] += dout[r * C + c];
            dwpe[r % T * C + c] += dout[r * C + c];
        }
    }
}

static void moments(double *mean, double *rstd, const double *x, size_t C)
{
    double sum = 0, var = 0;
    for (size_t c = 0; c < C; c++) {
        sum += x[c];
    }
    *mean = sum / (double)C;
    for (size_t c = 0; c < C; c++) {
        var += (x[c] - *mean) * (x[c] - *mean);
    }
    *rstd = 1 / sqrt(var / (double)C + 1e-5);
}

void ref_layernorm_forward(double *out, double *mean, double *rstd, const double *inp,
                           const double *weight, const double *bias, size_t N, size_t C)
{
    for (size_t n = 0; n < N; n++) {
        moments(mean + n, rstd + n, inp + n * C, C);
        for (size_t c = 0; c < C; c++) {
            out[n * C + c] = (inp[n * C + c] - mean[n]) * rstd[n] * weight[c] + bias[c];
        }
    }
}

// With xhat = (x - mean) * rstd and dxhat = dout * weight:
// dx = rstd * (dxhat - average(dxhat) - xhat * average(dxhat * xhat))
void ref_layernorm_backward(double *dinp, double *dweight, double *dbias, const double *dout,
                            const double *inp, const double *weight, size_t N, size_t C)
{
    memset(dweight, 0, C * sizeof *dweight);
    memset(dbias, 0, C * sizeof *dbias);
    for (size_t n = 0; n < N; n++) {
        const double *x = inp + n * C, *d = dout + n * C;
        double mean, rstd, average = 0, average_xhat = 0;
        moments(&mean, &rstd, x, C);
        for (size_t c = 0; c < C; c++) {
            double xhat = (x[c] - mean) * rstd;
            dweight[c] += d[c] * xhat;
            dbias[c] += d[c];
            average += d[c] * weight[c] / (double)C;
            average_xhat += d[c] * weight[c] * xhat / (double)C;
        }
        for (size_t c = 0; c < C; c++) {
            double xhat = (x[c] - mean) * rstd;
            dinp[n * C + c] = rstd * (d[c] * weight[c] - average - xhat * average_xhat);
        }
    }
}

void ref_matmul_forward(double *out, const double *inp, const double *weight, const double *bias,
                        const double *residual, size_t N, size_t C, size_t OC)
{
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            double sum = 0;
            for (size_t c = 0; c < C; c++) {
                sum += inp[n * C + c] * weight[o * C + c];
            }
            out[n * OC + o] = sum + (bias ? bias[o] : 0) + (residual ? residual[n * OC + o] : 0);
        }
    }
}

void ref_matmul_backward(double *dinp, double *dweight, double *dbias, const double *dout,
                         const double *inp, const double *weight, size_t N, size_t C, size_t OC)
{
    memset(dinp, 0, N * C * sizeof *dinp);
    memset(dweight, 0, OC * C * sizeof *dweight);
    memset(dbias, 0, OC * sizeof *dbias);
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            double d = dout[n * OC + o];
            dbias[o] += d;
            for (size_t c = 0; c < C; c++) {
                dinp[n * C + c] += d * weight[o * C + c];
                dweight[o * C + c] += d * inp[n * C + c];
            }
        }
    }
}

#define SQRT_2_PI 0.79788456080286535588

void ref_gelu_forward(double *out, const double *inp, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double x = inp[i];
        out[i] = 0.5 * x * (1 + tanh(SQRT_2_PI * (x + 0.044715 * x * x * x)));
    }
}

void ref_gelu_backward(double *dinp, const double *dout, const double *inp, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double x = inp[i], t = tanh(SQRT_2_PI * (x + 0.044715 * x * x * x));
        double dt = (1 - t * t) * SQRT_2_PI * (1 + 3 * 0.044715 * x * x);
        dinp[i] = dout[i] * (0.5 * (1 + t) + 0.5 * x * dt);
    }
}

// Element c of query (0), key (1) or value (2) of head h at row r = b*T + t.
static size_t at(size_t which, size_t r, size_t h, size_t c, size_t C, size_t hs)
{
    return r * 3 * C + which * C + h * hs + c;
}

// p(0..t): attention of row b*T+t on the rows before it; returns the log-sum-exp of the scores.
static double attend(double *p, const double *qkv, size_t b, size_t t, size_t h, size_t T, size_t C,
                     size_t hs)
{
    double max = -INFINITY, sum = 0;
    for (size_t s = 0; s <= t; s++) {
        double dot = 0;
        for (size_t c = 0; c < hs; c++) {
            dot += qkv[at(0, b * T + t, h, c, C, hs)] * qkv[at(1, b * T + s, h, c, C, hs)];
        }
        p[s] = dot / sqrt((double)hs);
        max = fmax(max, p[s]);
    }
    for (size_t s = 0; s <= t; s++) {
        p[s] = exp(p[s] - max);
        sum += p[s];
    }
    for (size_t s = 0; s <= t; s++) {
        p[s] /= sum;
    }
    return max + log(sum);
}

void ref_attention_forward(double *out, double *lse, const double *qkv, size_t B, size_t T,
                           size_t C, size_t NH)
{
    size_t hs = C / NH;
    double *p = malloc(T * sizeof *p);
    for (size_t i = 0; i < B * NH * T; i++) {
        size_t b = i / (NH * T), h = i / T % NH, t = i % T;
        lse[i] = attend(p, qkv, b, t, h, T, C, hs);
        for (size_t c = 0; c < hs; c++) {
            double sum = 0;
            for (size_t s = 0; s <= t; s++) {
                sum += p[s] * qkv[at(2, b * T + s, h, c, C, hs)];
            }
            out[(b * T + t) * C + h * hs + c] = sum;
        }
    }
    free(p);
}

void ref_attention_backward(double *dqkv, const double *dout, const double *qkv, size_t B, size_t T,
                            size_t C, size_t NH)
{
    size_t hs = C / NH;
    double *p = malloc(T * sizeof *p), *dp = malloc(T * sizeof *dp);
    memset(dqkv, 0, B * T * 3 * C * sizeof *dqkv);
    for (size_t i = 0; i < B * NH * T; i++) {
        size_t b = i / (NH * T), h = i / T % NH, t = i % T;
        const double *d = dout + (b * T + t) * C + h * hs;
        attend(p, qkv, b, t, h, T, C, hs);
        double average = 0;
        for (size_t s = 0; s <= t; s++) {
            dp[s] = 0;
            for (size_t c = 0; c < hs; c++) {
                dp[s] += d[c] * qkv[at(2, b * T + s, h, c, C, hs)];
                dqkv[at(2, b * T + s, h, c, C, hs)] += p[s] * d[c];
            }
            average += p[s] * dp[s];
        }
        for (size_t s = 0; s <= t; s++) {
            double dscore = p[s] * (dp[s] - average) / sqrt((double)hs);
            for (size_t c = 0; c < hs; c++) {
                size_t q = at(0, b * T + t, h, c, C, hs), k = at(1, b * T + s, h, c, C, hs);
                dqkv[q] += dscore * qkv[k];
                dqkv[k] += dscore * qkv[q];
            }
        }
    }
    free(p);
    free(dp);
}

void ref_classifier(double *losses, double *dlogits, const double *logits, const int32_t *targets,
                    double dscale, size_t N, size_t V, size_t Vp)
{
    memset(dlogits, 0, N * Vp * sizeof *dlogits);
    for (size_t n = 0; n < N; n++) {
        const double *x = logits + n * Vp;
        double max = -INFINITY, sum = 0;
        losses[n] = 0;
        if (targets[n] < 0) {
            continue;
        }
        for (size_t v = 0; v < V; v++) {
            max = fmax(max, x[v]);
        }
        for (size_t v = 0; v < V; v++) {
            sum += exp(x[v] - max);
        }
        losses[n] = max + log(sum) - x[targets[n]];
        for (size_t v = 0; v < V; v++) {
            double p = exp(x[v] - max) / sum;
            dlogits[n * Vp + v] = (p - (v == (size_t)targets[n])) * dscale;
        }
    }
}

double ref_sumsq(const double *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += x[i] * x[i];
    }
    return sum;
}

void ref_adamw(double *p, double *m, double *v, const double *g, const struct adamw *a, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double gi = g[i] * (double)a->scale;
        m[i] = (double)a->beta1 * m[i] + (double)a->one_minus_beta1 * gi;
        v[i] = (double)a->beta2 * v[i] + (double)a->one_minus_beta2 * gi * gi;
        p[i] = p[i] * (double)a->decay -
               (double)a->step * m[i] / (sqrt(v[i]) * (double)a->v_correction + (double)a->eps);
    }
}
