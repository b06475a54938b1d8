/* What the library says about itself, and what it asks of the system for big arrays. */
#define _GNU_SOURCE
#include "export.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#define HUGE_PAGE ((uintptr_t)1 << 21)

/* Keep in step with ABI_VERSION in library.py. */
EXPORT int32_t quire_abi_version(void) { return 22; }

/* Give the system back what was freed: after a load that is tens of megabytes, of which malloc would keep most. */
EXPORT void quire_give_back(void) {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

/* Ask for huge pages under the whole ones of [address, address + bytes): streaming a weight then misses the TLB 512
 * times less. Advice only; before the memory is first written. */
EXPORT void quire_advise_huge_pages(void *address, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    uintptr_t start = ((uintptr_t)address + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    uintptr_t end = ((uintptr_t)address + (uintptr_t)bytes) & ~(HUGE_PAGE - 1);
    if (start < end) madvise((void *)start, end - start, MADV_HUGEPAGE);
#else
    (void)address;
    (void)bytes;
#endif
}
