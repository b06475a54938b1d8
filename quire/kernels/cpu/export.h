/* What Python may call; everything else stays inside the library. */
#ifndef QUIRE_EXPORT_H
#define QUIRE_EXPORT_H

#define EXPORT __attribute__((visibility("default")))

#endif
