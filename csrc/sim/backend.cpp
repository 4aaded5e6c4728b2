// The simulated cards as a backend library: strata_backend() as any other exports it, and C functions to open cards, to
// read without a struct, and to plant errors.
#include <cstring>
#include <iterator>
#include <string>

#include "common/backend.hpp"
#include "common/launch_plan.hpp"
#include "sim/runtime.hpp"
#include "sim/watch.hpp"

#if defined(STRATA_SIM_STRICT)
#include "sim/traffic.hpp"
#endif

#define STRATA_EXPORT extern "C" __attribute__((visibility("default")))

// What gpu/device.cu exports; the build renames it, since the card's own table stands in front of it.
extern "C" const strata::Backend* strata_kernels_backend();

namespace strata::sim {
namespace {

// Lends the card what a read may touch, for as long as it lives.
class Lend {
  public:
    Lend(int device, const ReadArgs& a) : device_(device) {
        const Geometry& g = a.geometry;
        const bool in_place = a.residual_out == a.residual;
        const std::int64_t element = element_bytes(a.stream_type);
        if (!in_place) input("residual", static_cast<const char*>(a.residual), a.tokens * g.depth() * element);
        input("w_norm", a.w_norm, g.depth());
        input("w_down", a.w_down, g.rank * g.depth());
        input("w_up", a.w_up, g.depth() * g.rank);
        input("w_inject", a.w_inject, g.streams * g.depth());
        input("block_out", static_cast<const char*>(a.block_out), a.tokens * g.width * element);
        input("inject_prev", a.inject_prev, a.tokens * g.streams);
        lend("residual_out", static_cast<char*>(a.residual_out), a.tokens * g.depth() * element, true, in_place);
        output("mixed", a.mixed, a.tokens * g.width);
        output("inject", a.inject, a.tokens * g.streams);
        output("lo", a.lo, a.tokens * g.rank);
        output("rs", a.rs, a.tokens * g.streams);
        output("q8_1", a.q8_1, a.tokens * (g.width / kQ8Block) * kQ8Bytes);
        output("scratch", static_cast<char*>(a.scratch), scratch_bytes(g, a.tokens));
    }
    ~Lend() { withdraw(device_); }
    Lend(const Lend&) = delete;
    Lend& operator=(const Lend&) = delete;

  private:
    template <class T>
    void lend(const char* name, const T* begin, std::int64_t count, bool writable, bool defined) {
        declare(device_, name, begin, static_cast<std::size_t>(count) * sizeof(T), writable, defined);
    }
    template <class T>
    void input(const char* name, const T* begin, std::int64_t count) {
        lend(name, begin, count, false, true);
    }
    template <class T>
    void output(const char* name, const T* begin, std::int64_t count) {
        lend(name, begin, count, true, false);
    }

    int device_;
};

// The memory is the caller's only during the call, so the card's work is done before it returns.
bool read(const ReadArgs* args, const ReadChoice* choice, int device, void* stream, Report* report) {
    if (device < 0 || set_device(device) != 0) {
        take_error();
        report->say("there is no simulated card %d", device);
        return false;
    }
    const Lend lent(device, *args);
    if (!strata_kernels_backend()->read(args, choice, device, stream, report)) return false;
    if (const int code = stream_synchronize(static_cast<Stream>(stream))) {
        take_error();
        report->code = code;
        report->say("%s (%d): %s", error_name(code), code, error_text(code));
        return false;
    }
    return true;
}

bool find_call(const char* name, Call* call) {
    for (std::size_t i = 0; i < std::size(kCallNames); ++i) {
        if (std::strcmp(kCallNames[i], name) != 0) continue;
        *call = static_cast<Call>(i);
        return true;
    }
    return false;
}

}  // namespace
}  // namespace strata::sim

STRATA_EXPORT const strata::Backend* strata_backend() {
    static const strata::Backend backend = [] {
        strata::Backend table = *strata_kernels_backend();
        table.read = strata::sim::read;
        return table;
    }();
    return &backend;
}

// Opens a card, a profile's name or "name,lanes,shared,units", whose launches `seed` orders. It is a new device of the
// backend, which is made current; its number, or -1 with a report.
STRATA_EXPORT int strata_sim_open(const char* card, std::uint64_t seed, strata::Report* report) {
    std::string problem;
    const int device = strata::sim::open_card(card, seed, &problem);
    if (device < 0) {
        report->say("%s", problem.c_str());
        return -1;
    }
    strata::sim::set_device(device);
    strata::sim::take_error();  // of a card that was lost
    return device;
}

STRATA_EXPORT const char* strata_sim_cards() { return strata::sim::card_names(); }
STRATA_EXPORT bool strata_sim_strict() { return strata::sim::watch::kStrict; }

// strata_backend()->read for callers without its structs: `stream_type` is a number of StreamType, `pointers` are the
// pointers of ReadArgs in their order.
STRATA_EXPORT bool strata_sim_read(int device, const std::int64_t* geometry, std::int64_t tokens, float eps,
                                   int stream_type, void* const* pointers, const char* variant, int q8_columns,
                                   strata::Report* report) {
    strata::ReadArgs a{};
    a.geometry = {geometry[0], geometry[1], geometry[2]};
    a.tokens = tokens;
    a.eps = eps;
    a.stream_type = static_cast<strata::StreamType>(stream_type);
    a.residual = pointers[0];
    a.w_norm = static_cast<const float*>(pointers[1]);
    a.w_down = static_cast<const std::uint16_t*>(pointers[2]);
    a.w_up = static_cast<const std::uint16_t*>(pointers[3]);
    a.w_inject = static_cast<const std::uint16_t*>(pointers[4]);
    a.block_out = pointers[5];
    a.inject_prev = static_cast<const float*>(pointers[6]);
    a.mixed = static_cast<float*>(pointers[7]);
    a.inject = static_cast<float*>(pointers[8]);
    a.residual_out = pointers[9];
    a.lo = static_cast<float*>(pointers[10]);
    a.rs = static_cast<float*>(pointers[11]);
    a.q8_1 = static_cast<std::uint8_t*>(pointers[12]);
    a.scratch = pointers[13];
    strata::ReadChoice choice;
    choice.variant = variant;
    choice.q8_columns = q8_columns;
    return strata_backend()->read(&a, &choice, device, nullptr, report);
}

// ---------------------------------------------------------------------------------------------------------------------
// For tests of what happens when a runtime call fails. Calls have the names of kCallNames.

// The nth such call from now on gives `code`; with nth 0 nothing is planted any more. False: there is no such call.
STRATA_EXPORT bool strata_sim_plant(const char* call, long nth, int code) {
    strata::sim::Call which{};
    if (!strata::sim::find_call(call, &which)) return false;
    strata::sim::plant(which, nth, code);
    return true;
}

// How often it was made so far; -1: there is no such call.
STRATA_EXPORT long strata_sim_calls(const char* call) {
    strata::sim::Call which{};
    return strata::sim::find_call(call, &which) ? strata::sim::calls(which) : -1;
}

STRATA_EXPORT void strata_sim_set_pending(int code) { strata::sim::set_pending(code); }
STRATA_EXPORT int strata_sim_pending() { return strata::sim::pending_error(); }
STRATA_EXPORT long strata_sim_live_allocations() { return strata::sim::live_allocations(); }
STRATA_EXPORT long strata_sim_live_streams() { return strata::sim::live_streams(); }
STRATA_EXPORT long strata_sim_live_events() { return strata::sim::live_events(); }

// Writes every call from now on to a file, a line each: name, the kernel where it is a launch, the code that it gave.
STRATA_EXPORT void strata_sim_trace(const char* path) { strata::sim::trace(path); }

STRATA_EXPORT void* strata_sim_stream_create() {
    strata::sim::Stream stream = nullptr;
    strata::sim::stream_create(&stream);
    return stream;
}
STRATA_EXPORT int strata_sim_stream_destroy(void* stream) {
    return strata::sim::stream_destroy(static_cast<strata::sim::Stream>(stream));
}

// Captures on a stream, in global mode; ending one gives the number of launches in it, or minus the error code.
STRATA_EXPORT int strata_sim_capture_begin(void* stream) {
    return strata::sim::begin_capture(static_cast<strata::sim::Stream>(stream), strata::sim::CaptureMode::Global);
}
STRATA_EXPORT long strata_sim_capture_end(void* stream) {
    std::size_t launches = 0;
    const int code = strata::sim::end_capture(static_cast<strata::sim::Stream>(stream), &launches);
    return code != 0 ? -code : static_cast<long>(launches);
}

// Begins to count memory traffic, or ends it; a strict library's only. The table is that of sim/traffic.hpp.
STRATA_EXPORT bool strata_sim_count_traffic(bool on) {
#if defined(STRATA_SIM_STRICT)
    strata::sim::traffic::count(on);
    return true;
#else
    return !on;
#endif
}
STRATA_EXPORT const char* strata_sim_traffic() {
    static std::string table;
#if defined(STRATA_SIM_STRICT)
    table = strata::sim::traffic::table();
#endif
    return table.c_str();
}
