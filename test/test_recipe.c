// Learning-rate schedules against their closed forms, outlier scores against their definition.
#include "hete/recipe.h"
#include "test/cmocka.h"
#include "test/tiny.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void assert_near(double a, double b, double relative)
{
    if (!(fabs(a - b) <= relative * fmax(fabs(a), fabs(b)))) {
        fail_msg("%.17g is not %.17g", a, b);
    }
}

// ---- learning rate ------------------------------------------------------------------------------

// The fraction of the peak that is left when `done` of the fall is done.
static double fall(enum lr_shape shape, double final, double done)
{
    switch (shape) {
    case LR_COSINE:
        return final + (1 - final) * (1 + cos(acos(-1) * done)) / 2;
    case LR_LINEAR:
        return 1 - (1 - final) * done;
    case LR_WSD:
        return final + (1 - final) * (1 - sqrt(done));
    default:
        return 1;
    }
}

static const enum lr_shape shapes[] = {LR_COSINE, LR_LINEAR, LR_CONSTANT, LR_WSD};

static void test_closed_forms(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(shapes); i++) {
        struct lr_schedule s = {
            .shape = shapes[i], .lr = 6e-4, .final = 0.1, .warmup = 70, .steps = 1000};
        double start = s.shape == LR_WSD ? 800 : 70;
        for (uint64_t step = 0; step < 1000; step++) {
            double done = fmax(0, ((double)step - start) / (1000 - start));
            double expected =
                step < 70 ? 6e-4 * (double)(step + 1) / 70 : 6e-4 * fall(s.shape, 0.1, done);
            assert_near(lr_at(&s, step), expected, 1e-12);
        }
    }
}

// The rise ends at the peak, the fall at the final rate, and after the end nothing moves.
static void test_ends(void **state)
{
    const double finals[] = {0, 0.1, 1};
    (void)state;
    for (size_t i = 0; i < COUNT(shapes) * COUNT(finals); i++) {
        struct lr_schedule s = {.shape = shapes[i % COUNT(shapes)],
                                .lr = 1e-3,
                                .final = finals[i / COUNT(shapes)],
                                .warmup = 10,
                                .steps = 100};
        double end = s.shape == LR_CONSTANT ? 1e-3 : 1e-3 * s.final;
        assert_near(lr_at(&s, 0), 1e-4, 1e-12);
        assert_near(lr_at(&s, 9), 1e-3, 1e-12);
        assert_near(lr_at(&s, 10), 1e-3, 1e-12);
        assert_true(fabs(lr_at(&s, 100) - end) < 1e-15);
        assert_true(fabs(lr_at(&s, 1000000) - end) < 1e-15);
        for (uint64_t step = 10; step < 99; step++) {
            assert_true(lr_at(&s, step + 1) <= lr_at(&s, step) * (1 + 1e-15));
        }
        if (s.shape == LR_WSD) {
            assert_near(lr_at(&s, 80), 1e-3, 1e-12);
            assert_true(s.final == 1 || lr_at(&s, 81) < 0.99e-3);
        }
    }
}

// No warm-up, nothing but warm-up, no steps at all: a rate between 0 and the peak, never a NaN.
static void test_degenerate(void **state)
{
    static const uint64_t runs[][2] = {{0, 0}, {0, 1}, {1, 1}, {5, 5}, {9, 5}, {1, 0}, {0, 2}};
    (void)state;
    for (size_t i = 0; i < COUNT(shapes); i++) {
        for (size_t r = 0; r < COUNT(runs); r++) {
            struct lr_schedule s = {.shape = shapes[i],
                                    .lr = 1e-3,
                                    .final = 0.25,
                                    .warmup = runs[r][0],
                                    .steps = runs[r][1]};
            for (uint64_t step = 0; step < 12; step++) {
                double lr = lr_at(&s, step);
                assert_true(lr > 0 && lr <= 1e-3 * (1 + 1e-15));
            }
            if (s.warmup == 0 && s.steps > 0) {
                assert_near(lr_at(&s, 0), 1e-3, 1e-12);
            }
        }
    }
}

// ---- outliers -----------------------------------------------------------------------------------

// The last 128 values, mean and deviation from scratch.
static double naive_score(const double *values, size_t n)
{
    long double sum = 0, squares = 0;
    for (size_t i = n - 128; i < n; i++) {
        sum += (long double)values[i];
    }
    for (size_t i = n - 128; i < n; i++) {
        long double d = (long double)values[i] - sum / 128;
        squares += d * d;
    }
    return (double)(((long double)values[n - 1] - sum / 128) / sqrtl(squares / 128));
}

static void test_scores(void **state)
{
    static double values[1000];
    struct outlier o = {0};
    uint64_t rng = test_seed();
    (void)state;
    assert_int_equal(OUTLIER_WINDOW, 128);
    for (size_t i = 0; i < COUNT(values); i++) {
        // A mean that is large beside the deviation, and now and then a spike.
        values[i] = 1e5 + rng_normal(&rng) + (rng_below(&rng, 50) == 0 ? 30 : 0);
        double score = outlier_add(&o, values[i]);
        if (i + 1 < 128) {
            assert_true(isnan(score));
        } else {
            assert_true(fabs(score - naive_score(values, i + 1)) < 1e-8);
        }
    }
}

// A spike stands out, and is forgotten after 128 more values.
static void test_window(void **state)
{
    struct outlier o = {0};
    (void)state;
    for (int i = 0; i < 300; i++) {
        outlier_add(&o, i % 2 ? 1 : -1);
    }
    assert_true(outlier_add(&o, 100) > 10);
    for (int i = 0; i < 127; i++) {
        assert_true(fabs(outlier_add(&o, i % 2 ? 1 : -1)) < 0.3); // the spike is what deviates
    }
    assert_near(outlier_add(&o, 1), 1, 0.02); // it has left
}

// NaN and infinity are outliers at any time and leave the window as it is; equal values are none.
static void test_not_finite(void **state)
{
    struct outlier o = {0}, before;
    const double bad[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    for (int i = 0; i < 200; i++) {
        for (size_t b = 0; b < COUNT(bad); b++) {
            before = o;
            double score = outlier_add(&o, bad[b]);
            assert_true(isinf(score) && score > 0);
            assert_memory_equal(&o, &before, sizeof o);
        }
        double score = outlier_add(&o, 2.5);
        assert_true(i < 127 ? isnan(score) : score == 0);
    }
}

// The window is a plain struct of numbers: a copy goes on as the original does.
static void test_saved(void **state)
{
    struct outlier a = {0}, b;
    uint64_t rng = test_seed();
    double numbers[sizeof a / sizeof(double)];
    (void)state;
    for (int i = 0; i < 200; i++) {
        outlier_add(&a, rng_normal(&rng));
    }
    memcpy(numbers, &a, sizeof a);
    memcpy(&b, numbers, sizeof b);
    for (int i = 0; i < 300; i++) {
        double x = rng_normal(&rng);
        assert_true(outlier_add(&a, x) == outlier_add(&b, x));
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_closed_forms), cmocka_unit_test(test_ends),
        cmocka_unit_test(test_degenerate),   cmocka_unit_test(test_scores),
        cmocka_unit_test(test_window),       cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_saved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
