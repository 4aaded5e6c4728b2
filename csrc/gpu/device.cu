// Facts about each device and the choice made for it, kept once they are known, and the backend table.
//
// The choice: STRATA_HC_SPLIT says what is wanted, the self-test which variants are right, fused_gr_select decides. The
// self-test runs once a device, on its first read that no stream is capturing; until then a wish for P4 is capped at
// staged, and the other wishes are followed.
#include "gpu/vendor.hpp"  // first: it brings the device side of the maths functions

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "common/arch.hpp"
#include "common/launch_plan.hpp"
#include "gpu/faults.hpp"
#include "gpu/fused_gr.hpp"
#include "gpu/log.hpp"
#include "gpu/selftest.hpp"

#ifndef STRATA_BUILT_FOR
#error "the build names the architectures that it compiles for in STRATA_BUILT_FOR"
#endif

namespace strata::gpu {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// The environment, read once, when a device is first used: later changes do nothing, so that eager, captured and
// compiled calls all take the same path.

bool variable_is(const char* name, const char* value) {
    const char* text = std::getenv(name);
    return text != nullptr && std::strcmp(text, value) == 0;
}

struct Environment {
    bool present = false;
    std::string text;  // of STRATA_HC_SPLIT
    int want = kHcStaged;
    bool q8_wide = false;
    bool selftest = true;
    bool arch_override = false;

    Environment() {
        if (const char* value = std::getenv(kSelectorVariable)) {
            present = true;
            text = value;
        }
        want = fused_gr_env_want(present, text);
        q8_wide = variable_is(kQ8FuseVariable, "1");
        selftest = !variable_is(kSelftestVariable, "0");
        arch_override = std::getenv(kArchOverrideVariable) != nullptr;
    }
};

const Environment& environment() {
    static const Environment read;
    return read;
}

// ---------------------------------------------------------------------------------------------------------------
// Devices

const char* variant_name(int variant) { return fused_gr_find(variant)->name; }

struct Device {
    int index = 0;
    VendorDevice facts{};
    bool gfx12 = false;

    std::mutex check_mutex;                              // held while kernels are loaded and while the self-test runs
    std::atomic<bool> overlaps{false}, clusters{false};  // as facts says, less what the loaded code cannot do
    std::atomic<bool> loaded{false};  // every kernel but those of variants that have a gate of their own
    std::atomic<CheckState> state{CheckState::NotRun};

    // What reads ask for; written under check_mutex, before `state`.
    std::atomic<int> variant{kHcStaged};
    std::atomic<int> q8_columns{kUpNarrow};
    std::atomic<bool> plain_wrong{false};
    std::atomic<bool> runtime_geometry_wrong{false};
    std::atomic<bool> tiled{false};  // they may take reads of many tokens

    // Under check_mutex: why kernels could not be loaded, where they could not, of the established variants and of
    // others by their value; and what `describe` tells.
    std::string load_error;
    std::map<int, std::string> candidate_load_errors;
    Gates gates;
    std::string why;
    std::string first_difference;
};

LaunchLimits limits_of(const Device& device) {
    return {device.facts.shared_bytes, device.overlaps, device.clusters, device.facts.compute_units};
}

std::string selector_phrase(const Environment& env) {
    if (!env.present) return std::string(kSelectorVariable) + " is unset";
    return std::string(kSelectorVariable) + "='" + env.text.substr(0, 64) + "'";
}

// ---------------------------------------------------------------------------------------------------------------
// What is said about a choice, once a device. docs/variants.md has the table.

void say_choice(const Device& device, const SelftestResult& result, LogLines& lines) {
    const Environment& env = environment();
    const char* arch = device.facts.arch;
    const bool asked = env.want == kHcRegisterHalf;
    if (env.present && !fused_gr_env_known(env.text)) {
        lines.add(LogLevel::Warning, "%s on %s:%d names no variant; it takes %s. Using staged",
                  selector_phrase(env).c_str(), kBackendName, device.index, kSelectorValues);
    }
    if (!env.selftest) {
        lines.add(env.want > kHcStaged ? LogLevel::Warning : LogLevel::Info,
                  "%s=0: no self-test on %s:%d (%s); no variant above staged will run", kSelftestVariable, kBackendName,
                  device.index, arch);
        return;
    }
    if (asked && !device.gfx12) {
        lines.add(LogLevel::Warning, "%s=7 on %s:%d: P4 is restricted to gfx1200 and gfx1201, and this is %s; %s runs",
                  kSelectorVariable, kBackendName, device.index, arch, variant_name(device.variant));
    }
    if (!asked && device.gfx12) {
        lines.add(LogLevel::Info, "%s:%d is %s: P4 is opt-in through %s=7", kBackendName, device.index, arch,
                  kSelectorVariable);
    }
    if (asked && device.gfx12 && env.arch_override) {
        lines.add(LogLevel::Warning,
                  "%s is set: %s:%d only says that it is %s. P4 runs there if the self-test finds it right",
                  kArchOverrideVariable, kBackendName, device.index, arch);
    }
    if (asked && device.gfx12) {
        if (device.variant == kHcRegisterHalf) {
            lines.add(LogLevel::Info, "%s:%d (%s): P4 passed bitwise parity with staged and is selected", kBackendName,
                      device.index, arch);
        } else {
            const char* reason = result.candidate_error[0] != '\0' ? result.candidate_error
                                 : !result.gates.staged            ? "staged itself differs from plain"
                                                                   : "its bits differ from staged's";
            lines.add(LogLevel::Warning, "%s:%d (%s): P4 was asked for and is refused: %s; %s runs", kBackendName,
                      device.index, arch, reason, variant_name(device.variant));
        }
    }
    if (env.want == kHcStream || env.want == kHcAuto) {
        if (device.variant == kHcStream) {
            lines.add(LogLevel::Info, "%s:%d (%s): stream passed bitwise parity with plain and is selected",
                      kBackendName, device.index, arch);
        } else if (fused_gr_candidate(env.want, device.gfx12, device.overlaps) == kNoVariant) {
            lines.add(LogLevel::Info, "%s:%d (%s): launches do not overlap here, so %s=auto is %s", kBackendName,
                      device.index, arch, kSelectorVariable, variant_name(device.variant));
        } else {
            lines.add(LogLevel::Warning, "%s:%d (%s): stream was asked for and is refused: %s; %s runs", kBackendName,
                      device.index, arch,
                      result.candidate_error[0] != '\0' ? result.candidate_error : "its bits differ from plain's",
                      variant_name(device.variant));
        }
    }
    const bool selftest_ok = result.gates.state == CheckState::Completed && result.gates.plain && result.gates.split &&
                             result.gates.staged && result.gates.wide_up;
    if (const char* marker =
            fused_gr_p4_q32_parity_marker(selftest_ok, env.q8_wide, result.gates.staged, result.gates.p4)) {
        lines.add(LogLevel::Info, "%s", marker);
    }
    if (!result.gates.split || !result.gates.staged || !result.gates.wide_up) {
        lines.add(LogLevel::Warning, "self-test on %s:%d (%s): %s%s%sdiffers from plain; %s runs", kBackendName,
                  device.index, arch, result.gates.split ? "" : "split ", result.gates.staged ? "" : "staged ",
                  result.gates.wide_up ? "" : "the 32-column up kernel ", variant_name(device.variant));
    }
    if (!result.gates.tiled) {
        lines.add(LogLevel::Warning,
                  "self-test on %s:%d (%s): tiled differs from plain; %s runs for any number of tokens", kBackendName,
                  device.index, arch, variant_name(device.variant));
    }
}

// What names the element where plain differs from the CPU.
std::atomic<const Backend*> cpu_backend{nullptr};

// The last fatal code that a read of ours was refused for.
std::atomic<int> reported_fatal{0};

// An error that was there before this call is not ours: it stays for whoever made it. Where it is one that no device
// survives, nothing more is asked of the runtime. Returns whether that is so, with a report.
bool lost_before(Report* report) {
    const int before = pending_error();
    if (before == 0 || !fused_gr_context_fatal(before, kBackend)) return false;
    report->code = before;
    report->say("an earlier failure in this process, %s, left the device unusable: %s (%d, %s)",
                before == reported_fatal ? "which was reported then" : "not of strata_ops", error_name(before), before,
                error_text(before));
    return true;
}

// What a runtime call that the gate makes has said. True where it is success; false, with a report, where the device
// can still be used; otherwise the process ends.
bool gate_call(int code, const char* call, int index, Report* report) {
    if (code == 0) return true;
    end_if_fatal(code, call, index);
    report_error(report, code, call);
    return false;
}

// Runs body() with the device current, in a mode in which other threads' captures are not disturbed.
template <class Body>
bool on_device(int index, Report* report, Body body) {
    const RelaxedCapture relaxed;
    CurrentDevice current(index);
    if (!gate_call(current.error(), "making the device current", index, report)) return false;
    const bool done = body();
    Report left;
    const bool back = gate_call(current.leave(), "making the former device current", index, &left);
    if (done && !back) *report = left;
    return done && back;
}

// The device's entry, made on first use; null, with a report, where nothing can be learned of the device now.
Device* find_device(int index, Report* report) {
    static std::mutex mutex;
    static std::map<int, std::unique_ptr<Device>> devices;
    std::unique_lock<std::mutex> lock(mutex);
    if (const auto known = devices.find(index); known != devices.end()) return known->second.get();

    if (lost_before(report)) return nullptr;
    auto device = std::make_unique<Device>();
    device->index = index;
    const bool asked = on_device(index, report, [&] {
        return gate_call(query_device(index, &device->facts), "asking for the device's properties", index, report);
    });
    if (!asked) return nullptr;
    const Environment& env = environment();
    device->overlaps = device->facts.overlaps;
    device->clusters = device->facts.clusters;
    device->gfx12 = arch_is_gfx12(gate_architecture(device->facts.arch));
    device->variant = fused_gr_capped_at_staged(env.want);
    device->q8_columns = env.q8_wide ? kUpWide : kUpNarrow;
    device->why = selector_phrase(env) + "; the self-test has not run";
    if (!env.selftest) {
        device->state = CheckState::Skipped;
        device->gates.state = CheckState::Skipped;
        device->why =
            selector_phrase(env) + "; " + kSelftestVariable + "=0 skips the self-test, so at most staged runs";
    }
    Device* const made = devices.emplace(index, std::move(device)).first->second.get();
    lock.unlock();
    if (!env.selftest) {
        LogLines lines;
        say_choice(*made, {}, lines);
        lines.say();
    }
    return made;
}

void plain_is_wrong(const Device& device, Report* report) {
    report->say(
        "%s:%d (%s) does not compute what the CPU does: the self-test's plain variant differs "
        "in %s. Use the CPU and report the output of `python -m strata_ops parity`; %s=0 runs the device all "
        "the same",
        kBackendName, device.index, device.facts.arch, device.first_difference.c_str(), kSelftestVariable);
}

// Something that all variants need failed, as `report` says: what is established runs.
void not_completed(Device& device, LogLines& lines, const Report& report) {
    const Environment& env = environment();
    device.gates = {CheckState::NotCompleted};
    device.tiled = false;
    device.variant = fused_gr_capped_at_staged(env.want);
    device.why = selector_phrase(env) + "; the self-test did not complete: " + report.text;
    device.state = CheckState::NotCompleted;
    lines.add(LogLevel::Warning, "%s; %s runs, and nothing above staged can until strata_ops.check(%d) completes",
              report.text, variant_name(device.variant), device.index);
}

// Loads the kernels. check_mutex is held. Without those of a variant with a gate of its own it is out of reach, and
// nothing else. False, with a report, where others could not be loaded.
bool load_kernels(Device& device, Report* report) {
    device.load_error.clear();
    device.candidate_load_errors.clear();
    LaunchLimits limits = limits_of(device);
    const bool loaded = on_device(device.index, report, [&] {
        for (const GrVariant& row : kGrVariants) {
            const std::string call = std::string("loading the kernels of ") + row.name;
            const int code = fused_gr_prepare(row.value, &limits);
            Report said;
            if (gate_call(code, call.c_str(), device.index, &said)) continue;
            if (fused_gr_has_own_gate(row.value)) {
                device.candidate_load_errors[row.value] = said.text;
                continue;
            }
            report->code = said.code;
            report->say("%s (%s:%d is %s; this library was built for %s)", said.text, kBackendName, device.index,
                        device.facts.arch, STRATA_BUILT_FOR);
            return false;
        }
        return true;
    });
    if (!loaded) device.load_error = report->text;
    device.overlaps = limits.overlaps;
    device.clusters = limits.clusters;
    device.loaded = loaded;
    return loaded;
}

// Before the first launch on a device, which may be part of a capture. Where kernels cannot be loaded the read goes on,
// its launch says whether it can, and the next read tries again.
void load_once(Device& device) {
    if (device.loaded) return;
    LogLines lines;
    {
        const std::lock_guard<std::mutex> lock(device.check_mutex);
        if (device.loaded) return;
        Report report;
        if (!load_kernels(device, &report) && device.state == CheckState::NotRun) not_completed(device, lines, report);
    }
    lines.say();
}

// Runs the self-test now and latches what it says. check_mutex is held. False, with a report, where it did not
// complete.
bool run_check(Device& device, CheckVisitor visit, void* context, LogLines& lines, Report* report) {
    const Environment& env = environment();
    const bool all_loaded = device.loaded && device.candidate_load_errors.empty();
    if (!all_loaded && !load_kernels(device, report)) {
        not_completed(device, lines, *report);
        return false;
    }
    const int candidate = fused_gr_candidate(env.want, device.gfx12, device.overlaps);
    const auto unloaded = device.candidate_load_errors.find(candidate);
    const bool candidate_loaded = unloaded == device.candidate_load_errors.end();
    SelftestRequest request{};
    request.device = device.index;
    request.limits = limits_of(device);
    request.candidate = candidate_loaded ? candidate : kNoVariant;
    request.case_stride = fault_case_stride();
    request.visit = visit;
    request.context = context;
    request.cpu = cpu_backend;
    SelftestResult result;
    const bool completed = on_device(device.index, report, [&] {
        result = fused_gr_selftest(request, report);
        return result.gates.state == CheckState::Completed;
    });
    if (!completed) {
        not_completed(device, lines, *report);
        return false;
    }
    if (!candidate_loaded) {
        std::snprintf(result.candidate_error, sizeof result.candidate_error, "%s", unloaded->second.c_str());
    }
    device.gates = result.gates;
    const Gates& gates = result.gates;
    const bool p4_gate = fused_gr_p4_parity_gate(device.gfx12, gates.staged, gates.p4);
    device.variant = fused_gr_choose(env.want, gates.split, gates.staged, p4_gate, gates.stream);
    device.q8_columns = env.q8_wide && gates.wide_up ? kUpWide : kUpNarrow;
    device.first_difference = result.first_difference;
    device.plain_wrong = !gates.plain;
    device.runtime_geometry_wrong = !gates.runtime_geometry;
    device.tiled = gates.plain && gates.tiled;
    device.why = selector_phrase(env);
    if (!gates.plain) {
        device.why += "; plain differs from the CPU in " + device.first_difference + ", so reads are refused";
        device.gates.split = device.gates.staged = device.gates.wide_up = device.gates.runtime_geometry = false;
        device.gates.tiled = device.gates.p4 = device.gates.stream = false;
        device.variant = kHcPlain;
    } else if (env.want == device.variant || (env.want == kHcAuto && device.variant == kHcStream)) {
        device.why += "; it passed the self-test";
    } else if (env.want == kHcRegisterHalf && !device.gfx12) {
        device.why += "; P4 is for gfx1200 and gfx1201 only";
    } else if (env.want == kHcRegisterHalf) {
        device.why += std::string("; P4 did not pass the self-test ") + result.candidate_error;
    } else if (env.want == kHcAuto && candidate == kNoVariant) {
        device.why += "; launches do not overlap here, which stream gains by";
    } else if (env.want == kHcAuto || env.want == kHcStream) {
        device.why += std::string("; stream did not pass the self-test ") + result.candidate_error;
    } else {
        device.why += std::string("; ") + variant_name(env.want) + " did not pass the self-test";
    }
    device.state = gates.state;
    if (!gates.plain) {
        Report said;
        plain_is_wrong(device, &said);
        lines.add(LogLevel::Error, "%s", said.text);
    } else {
        say_choice(device, result, lines);
    }
    return true;
}

// The check of the first read. Nothing where it has run, is to be skipped, or `stream` is capturing.
bool check_once(Device& device, Stream stream, Report* report) {
    if (device.state != CheckState::NotRun) return true;
    bool capturing = false;
    const int code = stream_is_capturing(stream, &capturing);
    if (!gate_call(code, "asking whether the stream is capturing", device.index, report)) return false;
    if (capturing) return true;
    LogLines lines;
    {
        const std::lock_guard<std::mutex> lock(device.check_mutex);
        if (device.state != CheckState::NotRun) return true;
        Report check_report;  // a check that did not complete is logged, and the established variant runs
        run_check(device, nullptr, nullptr, lines, &check_report);
    }
    lines.say();
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// The backend table's functions

int device_count(Report* report) {
    int count = 0;
    const int code = count_devices(&count);
    if (code == 0 && count > 0) return count;
    take_error();
    report->code = code;
    report->say("no usable %s device: %s", kBackendName, code == 0 ? "the runtime counts none" : error_text(code));
    return -1;
}

bool describe(int index, DeviceFacts* out, Report* report) {
    Device* device = find_device(index, report);
    if (device == nullptr) return false;
    std::snprintf(out->name, sizeof out->name, "%s", device->facts.name);
    std::snprintf(out->arch, sizeof out->arch, "%s", device->facts.arch);
    out->wave_width = device->facts.wave_width;
    out->compute_units = device->facts.compute_units;
    out->shared_bytes = static_cast<std::int64_t>(device->facts.shared_bytes);
    std::snprintf(out->want, sizeof out->want, "%s", fused_gr_want_name(environment().want));
    std::snprintf(out->chosen, sizeof out->chosen, "%s", variant_name(device->variant));
    const std::lock_guard<std::mutex> lock(device->check_mutex);
    std::snprintf(out->why, sizeof out->why, "%s", device->why.c_str());
    out->gates = device->gates;
    return true;
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

constexpr const char* kWrongGeometry =
    "the variant '%s' is compiled for N=2560, HC=4, LR=320 alone; 'runtime_geometry' takes others";

std::int64_t scratch_size(const Geometry* geometry, std::int64_t tokens) { return scratch_bytes(*geometry, tokens); }

bool read(const ReadArgs* args, const ReadChoice* choice, int index, void* raw_stream, Report* report) {
    if (lost_before(report)) return false;
    const auto stream = static_cast<Stream>(raw_stream);
    Device* device = find_device(index, report);
    if (device == nullptr) return false;
    load_once(*device);
    const auto queue = [&](int variant, int q8_columns) {
        if (fused_gr_read_multi(*args, variant, q8_columns, limits_of(*device), stream, report)) return true;
        const std::lock_guard<std::mutex> lock(device->check_mutex);
        const auto own = device->candidate_load_errors.find(variant);
        const std::string& load_error = own != device->candidate_load_errors.end() ? own->second : device->load_error;
        if (!load_error.empty())
            report->say("%s; before that, %s", std::string(report->text).c_str(), load_error.c_str());
        return false;
    };

    if (choice->variant != nullptr) {  // forced: no gate
        const GrVariant* row = fused_gr_find(choice->variant);
        if (row == nullptr) {
            report->say("there is no variant '%s'; there are %s", choice->variant, variant_list());
            return false;
        }
        if (row->value != kHcRuntimeGeometry && args->geometry != kModelGeometry) {
            report->say(kWrongGeometry, row->name);
            return false;
        }
        const int columns = choice->q8_columns != 0 ? choice->q8_columns : device->q8_columns.load();
        return queue(row->value, columns);
    }

    if (!check_once(*device, stream, report)) return false;
    if (device->plain_wrong) {
        plain_is_wrong(*device, report);
        return false;
    }
    if (args->geometry != kModelGeometry && device->runtime_geometry_wrong) {
        report->say(
            "%s:%d (%s): the kernels for this geometry differ from plain in the self-test; use "
            "the CPU, or the geometry 2560/4/320; %s=0 runs them all the same",
            kBackendName, index, device->facts.arch, kSelftestVariable);
        return false;
    }
    const int variant = device->variant;
    const bool tiled =
        device->tiled && args->geometry == kModelGeometry && args->tokens >= fused_gr_tiled_from(variant);
    return queue(tiled ? fused_gr_tiled(args->tokens, device->facts.compute_units) : variant, device->q8_columns);
}

void set_log(LogSink sink) { log_sink = sink; }

void set_witness(const Backend* cpu) { cpu_backend = cpu; }

}  // namespace

bool fused_gr_check(int index, CheckVisitor visit, void* context, Report* report) {
    if (lost_before(report)) return false;
    Device* device = find_device(index, report);
    if (device == nullptr) return false;
    if (!environment().selftest) {
        report->say("%s=0 was set when the device was first used: the self-test is skipped in this process",
                    kSelftestVariable);
        return false;
    }
    LogLines lines;
    bool completed = false;
    {
        const std::lock_guard<std::mutex> lock(device->check_mutex);
        completed = run_check(*device, visit, context, lines, report);
    }
    lines.say();
    return completed;
}

int fused_gr_variant(int device, Report* report) {
    const Device* entry = find_device(device, report);
    return entry == nullptr ? -1 : entry->variant.load();
}

void report_error(Report* report, int code, const char* call) {
    if (fused_gr_context_fatal(code, kBackend)) {
        reported_fatal = code;
    } else if (pending_error() == code) {  // a driver's function leaves none, and another library's is not ours to take
        take_error();
    }
    report->code = code;
    report->say("%s failed: %s (%d): %s", call, error_name(code), code, error_text(code));
}

void end_if_fatal(int code, const char* call, int device) {
    if (!fused_gr_context_fatal(code, kBackend)) return;
    std::fprintf(
        stderr, "strata_ops: fatal: %s (%d) from %s on %s:%d: the device cannot be used any more, ending the process\n",
        error_name(code), code, call, kBackendName, device);
    std::fflush(nullptr);
    std::_Exit(1);
}

}  // namespace strata::gpu

extern "C" __attribute__((visibility("default"))) const strata::Backend* strata_backend() {
    using namespace strata;
    static const Backend backend{kBackendAbi,       gpu::kBackendName,   STRATA_BUILT_FOR,  gpu::variant_list(),
                                 gpu::device_count, gpu::describe,       gpu::scratch_size, gpu::read,
                                 gpu::set_log,      gpu::fused_gr_check, gpu::set_witness};
    return &backend;
}
