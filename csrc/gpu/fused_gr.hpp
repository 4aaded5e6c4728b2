// The GPU core's interface: what the backend table, the self-test and the tests call. No torch.
#pragma once

#include <cstddef>

#include "common/backend.hpp"
#include "common/launch_plan.hpp"
#include "gpu/vendor.hpp"

namespace strata::gpu {

// Queues a read of args.tokens tokens, any number, on `stream` of the current device, which has `limits`. `variant` is
// a value of kGrVariants; kHcRuntimeGeometry is taken in its place where the geometry is not the model's. `q8_columns`
// is 16 or 32. False, with a report, where a launch failed.
bool fused_gr_read_multi(const ReadArgs& args, int variant, int q8_columns, const LaunchLimits& limits, Stream stream,
                         Report* report);

// Loads the kernels of `variant`, a value of kGrVariants, onto the current device and sets their attributes there: once
// a device, before the first launch. Plain's come first: the others need some of them. Takes out of `limits` what the
// card can do and the code that was loaded cannot, or nothing is left for. Returns the runtime's error code.
int fused_gr_prepare(int variant, LaunchLimits* limits);

// Runs the self-test (selftest.hpp) on `device` now and latches what it finds; `visit` is called for each comparison.
// False, with a report, where it is to be skipped or did not complete: then it may be called again.
bool fused_gr_check(int device, CheckVisitor visit, void* context, Report* report);

// The variant that a read of the model's geometry takes on `device`: what STRATA_HC_SPLIT asks for and the self-test
// allows; capped at staged until that has run. Negative, with a report, where the device cannot be used.
int fused_gr_variant(int device, Report* report);

// Says in `report` that runtime call `call` gave `code`, and takes the error away so that no other library is blamed.
void report_error(Report* report, int code, const char* call);

// Ends the process where `code`, which the gate's call `call` for `device` gave, leaves the device unusable or is one
// that nobody has classified: a line on standard error, no destructor, no other runtime call.
void end_if_fatal(int code, const char* call, int device);

}  // namespace strata::gpu
