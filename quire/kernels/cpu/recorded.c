/* Runs a recorded list of kernel calls: a decoder's whole step is then one call from Python (ops/recording.py). */
#include "recorded.h"

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
