/* Runs a recorded list of kernel calls: a decoder's whole step is then one call from Python (ops/recording.py). */
#include "recorded.h"

#define MOST_WORDS 24 /* _MOST_WORDS of recording.py; quire_attend has 21 arguments */

/* Argument i is values[i] plus the step's word number bases[i]. Word 0 is zero, so a constant has base 0; word 1 is
 * where the intermediate results lie; the others are what changes from step to step. */
typedef struct {
    recorded_fn run;
    int32_t count;
    uint8_t bases[MOST_WORDS];
    int64_t values[MOST_WORDS];
} recorded_call;

/* The calls in their order, up to the first that returns something else than 0: that is returned, and *failed says
 * which call it was. */
EXPORT int32_t quire_replay(const recorded_call *calls, int64_t count, const int64_t *step, int64_t *failed) {
    for (const recorded_call *call = calls; call < calls + count; call++) {
        int64_t words[MOST_WORDS];
        for (int32_t i = 0; i < call->count; i++) words[i] = step[call->bases[i]] + call->values[i];
        int32_t state = call->run(words);
        if (state) {
            *failed = call - calls;
            return state;
        }
    }
    return 0;
}
