// What the engine promises beside equal bits; each throws std::runtime_error when it is broken.
#pragma once
#include <cstdint>

#include "engine.h"

namespace stress {

// A worker chosen by `seed` throws while others wait at a barrier: run() must throw what it threw,
// and the engine must go on working.
void check_failing_worker(ktg::Engine& engine, uint64_t seed);

// next_unit and NearUnits hand out each unit once, a node's own units first.
void check_units();

// A service answers a request that fails, and all after it, with the failure mark.
void check_mailbox_failure();

}  // namespace stress
