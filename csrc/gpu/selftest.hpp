// The self-test's interface for device.cu: one run on one device, and what it found.
#pragma once

#include "common/backend.hpp"
#include "gpu/fused_gr.hpp"

namespace strata::gpu {

struct SelftestRequest {
    int device;
    LaunchLimits limits;
    int candidate;        // compare P4 with staged too, or stream with plain; kNoVariant: neither
    int case_stride = 1;  // every n-th case: 1, except on the simulated card in tests that only look at the rules
    CheckVisitor visit = nullptr;
    void* context = nullptr;
    const Backend* cpu = nullptr;  // names the element where plain differs from the CPU's hashes; may be missing
};

struct SelftestResult {
    Gates gates;
    char candidate_error[256] = {};   // why the candidate could not be compared, where it could not
    char first_difference[256] = {};  // of plain from the CPU's answer
};

// Compares all variants on the current device. Returns with gates.state NotCompleted and a report where a resource that
// all of them need failed. A context that is lost, or an error that nobody has classified, ends the process.
SelftestResult fused_gr_selftest(const SelftestRequest& request, Report* report);

}  // namespace strata::gpu
