// Facts about each device and the choice made for it, kept once they are known, and the backend table.
#include "gpu/vendor.hpp"  // first: it brings the device side of the maths functions

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "common/arch.hpp"
#include "common/launch_plan.hpp"
#include "gpu/fused_gr.hpp"

#ifndef STRATA_BUILT_FOR
#error "the build names the architectures that it compiles for in STRATA_BUILT_FOR"
#endif

namespace strata::gpu {
namespace {

// The environment, read once, when a device is first used: later changes do nothing, so that eager, captured and
// compiled calls all take the same path.
struct Environment {
    bool present = false;
    std::string text;  // of STRATA_HC_SPLIT
    int want = kHcStaged;
    int q8_columns = kUpNarrow;
};

const Environment& environment() {
    static const Environment read = [] {
        Environment env;
        if (const char* text = std::getenv(kSelectorVariable)) {
            env.present = true;
            env.text = text;
            if (!fused_gr_env_known(text)) {
                std::fprintf(stderr, "strata_ops: warning: %s='%s' is not one of %s; using staged\n", kSelectorVariable,
                             text, kSelectorValues);
            }
        }
        env.want = fused_gr_env_variant(env.present, fused_gr_env_character(env.text));
        const char* fuse = std::getenv(kQ8FuseVariable);
        env.q8_columns = fuse != nullptr && std::strcmp(fuse, "1") == 0 ? kUpWide : kUpNarrow;
        return env;
    }();
    return read;
}

struct DeviceState {
    VendorDevice facts{};
    int variant = kHcStaged;
};

const char* variant_name(int variant) { return fused_gr_find(variant)->name; }

// The state of `device`, which is made on first use; null, with a report, where the device cannot be used.
const DeviceState* device_state(int device, Report* report) {
    static std::mutex mutex;
    static std::map<int, DeviceState> states;
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto known = states.find(device); known != states.end()) return &known->second;

    const RelaxedCapture relaxed;  // loading kernels is no part of anybody's graph
    const CurrentDevice current(device);
    if (current.error() != 0) {
        report_error(report, current.error(), "making the device current");
        return nullptr;
    }
    DeviceState state;
    if (const int code = query_device(device, &state.facts)) {
        report_error(report, code, "asking for the device's properties");
        return nullptr;
    }
    if (const int code = fused_gr_prepare(state.facts.shared_bytes)) {
        report_error(report, code, "loading the kernels");
        const std::string said = report->text;
        report->say("%s (%s:%d is %s; this library was built for %s)", said.c_str(), kBackendName, device,
                    state.facts.arch, STRATA_BUILT_FOR);
        return nullptr;
    }
    state.variant = fused_gr_capped_at_staged(environment().want);
    return &states.emplace(device, state).first->second;
}

int device_count(Report* report) {
    int count = 0;
    const int code = count_devices(&count);
    if (code == 0 && count > 0) return count;
    take_error();
    report->code = code;
    report->say("no usable %s device: %s", kBackendName, code == 0 ? "the runtime counts none" : error_text(code));
    return -1;
}

bool describe(int device, DeviceFacts* out, Report* report) {
    const DeviceState* state = device_state(device, report);
    if (state == nullptr) return false;
    const Environment& env = environment();
    std::snprintf(out->name, sizeof out->name, "%s", state->facts.name);
    std::snprintf(out->arch, sizeof out->arch, "%s", state->facts.arch);
    out->wave_width = state->facts.wave_width;
    out->compute_units = state->facts.compute_units;
    out->shared_bytes = static_cast<std::int64_t>(state->facts.shared_bytes);
    std::snprintf(out->want, sizeof out->want, "%s", variant_name(env.want));
    std::snprintf(out->chosen, sizeof out->chosen, "%s", variant_name(state->variant));
    const char* cap = "";
    if (env.want != state->variant) {
        cap = arch_is_gfx12(state->facts.arch) ? "; capped at staged, since no self-test has compared P4 with it"
                                               : "; P4 is for gfx1200 and gfx1201 only";
    }
    if (env.present) {
        std::snprintf(out->why, sizeof out->why, "%s='%.64s'%s%s", kSelectorVariable, env.text.c_str(),
                      fused_gr_env_known(env.text) ? "" : " names no variant", cap);
    } else {
        std::snprintf(out->why, sizeof out->why, "%s is unset", kSelectorVariable);
    }
    return true;
}

constexpr const char* kWrongGeometry =
    "fused_gr_read: the variant '%s' is compiled for N=2560, HC=4, LR=320 alone; 'runtime_geometry' takes others";

std::int64_t scratch_size(const Geometry* geometry, std::int64_t tokens) { return scratch_bytes(*geometry, tokens); }

bool read(const ReadArgs* args, const ReadChoice* choice, int device, void* stream, Report* report) {
    // An error that was there before this call is not ours: it stays for whoever made it.
    if (const int before = pending_error(); before != 0 && fused_gr_context_fatal(before, kBackend)) {
        report->code = before;
        report->say(
            "fused_gr_read: an earlier failure in this process, not of strata_ops, left the device unusable: "
            "%s (%d, %s)",
            error_name(before), before, error_text(before));
        return false;
    }
    const DeviceState* state = device_state(device, report);
    if (state == nullptr) return false;
    int variant = state->variant;
    if (choice->variant != nullptr) {
        const GrVariant* row = fused_gr_find(choice->variant);
        if (row == nullptr) {
            report->say("fused_gr_read: there is no variant '%s'", choice->variant);
            return false;
        }
        if (row->value != kHcRuntimeGeometry && args->geometry != kModelGeometry) {
            report->say(kWrongGeometry, row->name);
            return false;
        }
        variant = row->value;
    }
    const int q8_columns = choice->q8_columns != 0 ? choice->q8_columns : environment().q8_columns;
    return fused_gr_read_multi(*args, variant, q8_columns, state->facts.shared_bytes, static_cast<Stream>(stream),
                               report);
}

// The names of all variants, comma separated.
const char* variant_list() {
    static const std::string list = [] {
        std::string names;
        for (const GrVariant& row : kGrVariants) names += std::string(names.empty() ? "" : ",") + row.name;
        return names;
    }();
    return list.c_str();
}

}  // namespace

int fused_gr_variant(int device, Report* report) {
    const DeviceState* state = device_state(device, report);
    return state == nullptr ? -1 : state->variant;
}

void report_error(Report* report, int code, const char* call) {
    take_error();
    report->code = code;
    report->say("fused_gr_read: %s failed: %s (%d): %s", call, error_name(code), code, error_text(code));
}

}  // namespace strata::gpu

extern "C" __attribute__((visibility("default"))) const strata::Backend* strata_backend() {
    using namespace strata;
    static const Backend backend{kBackendAbi,       gpu::kBackendName, STRATA_BUILT_FOR,  gpu::variant_list(),
                                 gpu::device_count, gpu::describe,     gpu::scratch_size, gpu::read};
    return &backend;
}
