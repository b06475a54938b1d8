/* Integer products with AVX2, and with AVX-VNNI where the processor has it. */
#include "integer.h"

const int_kernel *quire_int_avx2(void) { return NULL; }
const int_kernel *quire_int_avxvnni(void) { return NULL; }
