// What becomes of memory that this process frees. Torch-free, thread-safe.
#pragma once

namespace pipetransformer::core {

// Lets the C library keep memory that is freed until it is wanted again. By
// default glibc gives large blocks back to the system at once, and takes pages
// anew, each of which the system clears at its first use: in every step again.
// Returns whether freed memory is kept now: false, and nothing changed, under
// another C library, and where the environment says how memory is allocated
// (MALLOC_*, GLIBC_TUNABLES).
bool keep_freed_memory();

// Gives back what is free, now; what is kept from here on stays as it is.
void give_back_freed_memory();

// Ends what `keep_freed_memory` began: the thresholds are those to which glibc
// raises its own at most, and what is free is given back. That threads which
// begin later share the pools that there are cannot be undone.
void stop_keeping_freed_memory();

}  // namespace pipetransformer::core
