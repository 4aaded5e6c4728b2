// The boundary of a backend: plain structs and function pointers, so that the torch layer, the Python module and the
// tests talk to the CPU, a GPU library and the simulated card in the same way. No torch, no vendor runtime.
#pragma once

#include <cstdint>
#include <cstdio>

#include "common/geometry.hpp"

namespace strata {

// Counted up when a struct below changes: libraries and the Python module must agree.
inline constexpr std::uint32_t kBackendAbi = 6;

// Where a call says what went wrong. `code` is the vendor runtime's, 0 where there is none.
struct Report {
    int code = 0;
    char text[512] = {};

    template <class... Values>
    void say(const char* format, Values... values) {
        std::snprintf(text, sizeof text, format, values...);
    }
};

// One read. Every pointer is to contiguous memory of the backend's device that starts on a kAlignment boundary, in the
// layouts of docs/; sizes in elements. Null means: not given, or not asked for.
struct ReadArgs {
    Geometry geometry;
    std::int64_t tokens;  // T, any number
    float eps;
    StreamType stream_type;         // of residual, block_out and residual_out
    const void* residual;           // (T, HC, N)
    const float* w_norm;            // (HC, N), the full gain
    const std::uint16_t* w_down;    // (LR, D) bf16
    const std::uint16_t* w_up;      // (D, LR) bf16
    const std::uint16_t* w_inject;  // (HC, D) bf16, or null
    const void* block_out;          // (T, N), or null: no pending write
    const float* inject_prev;       // (T, HC), null exactly where block_out is
    float* mixed;                   // (T, N)
    float* inject;                  // (T, HC), null exactly where w_inject is
    void* residual_out;             // (T, HC, N), may equal `residual`; null exactly where block_out is
    float* lo;                      // (T, LR)
    float* rs;                      // (T, HC)
    std::uint8_t* q8_1;             // (T, N / 32, 36), or null
    void* scratch;                  // scratch_size() bytes
};

// The place `elements` after `begin` in memory of this type; null stays null.
inline const void* stream_at(const void* begin, StreamType type, std::int64_t elements) {
    return begin == nullptr ? nullptr : static_cast<const char*>(begin) + elements * element_bytes(type);
}
inline void* stream_at(void* begin, StreamType type, std::int64_t elements) {
    return begin == nullptr ? nullptr : static_cast<char*>(begin) + elements * element_bytes(type);
}

// What is not part of the answer: which code computes it.
struct ReadChoice {
    const char* variant = nullptr;  // a name from DeviceFacts::variants, or null for the backend's own choice
    int q8_columns = 0;             // up kernel for q8_1: 16, 32, or 0 for the environment's choice
};

// ---------------------------------------------------------------------------------------------------------------
// The self-test's word about a device, and lines that the library says.

enum class LogLevel : int { Info, Warning, Error };
using LogSink = void (*)(LogLevel level, const char* line);

// "Not run" is not "failed": until the check has run, P4 is out of reach and nothing else changes.
enum class CheckState : int {
    NotRun,
    Skipped,       // STRATA_SELFTEST=0
    NotCompleted,  // something that all variants need failed; it may be tried again
    Completed,
};

// What a comparison of the self-test says, each for all of its cases.
struct Gates {
    CheckState state = CheckState::NotRun;
    bool plain = false;             // equals the CPU's answer
    bool split = false;             // equals plain
    bool staged = false;            // equals plain
    bool wide_up = false;           // the 32-column up kernel equals the 16-column one
    bool runtime_geometry = false;  // equals plain
    bool tiled = false;             // equals plain, on a card with shared memory for it
    bool p4 = false;                // equals staged, and was asked for
    bool stream = false;            // equals plain, and was asked for
};

// One comparison of the self-test.
struct CheckLine {
    int tokens;
    StreamType stream_type;
    bool fold, inject, q8_1;
    const char* variant;  // whose answer
    int q8_columns;
    const char* against;  // compared with whose
    bool equal;
    const char* output;      // where not equal: the first difference, in which output,
    std::int64_t index;      // at which 32-bit word of it,
    std::uint32_t expected;  // and both bit patterns (equal ones where no more than a hash is known)
    std::uint32_t got;
};
using CheckVisitor = void (*)(const CheckLine* line, void* context);

struct DeviceFacts {
    char name[256];
    char arch[128];  // "sm_90", "gfx1201:sramecc-:xnack-", "x86-64 avx512"
    int wave_width;  // hardware lanes of a wave, for planning only
    int compute_units;
    std::int64_t shared_bytes;  // most that a block may ask for
    char want[32];              // the variant that the environment asks for
    char chosen[32];            // the variant that runs at the model's geometry
    char why[512];
    Gates gates;
};

struct Backend {
    std::uint32_t abi;
    const char* name;       // "cpu", "cuda", "hip"
    const char* built_for;  // targets it was compiled for
    const char* variants;   // names that ReadChoice takes, comma separated

    // Devices that can be used; -1 with a report where the runtime says that there are none.
    int (*device_count)(Report*);
    bool (*describe)(int device, DeviceFacts*, Report*);
    std::int64_t (*scratch_size)(const Geometry*, std::int64_t tokens);
    // Queues the read on `stream` of the current device (the CPU computes it before returning).
    bool (*read)(const ReadArgs*, const ReadChoice*, int device, void* stream, Report*);

    // Where lines go from now on; null means standard error. Null where the backend says nothing.
    void (*set_log)(LogSink sink) = nullptr;
    // Runs the self-test on `device` now, and latches what it finds; `visit` is called for each comparison. False,
    // with a report, where it did not complete. Null where there is nothing to test.
    bool (*check)(int device, CheckVisitor visit, void* context, Report*) = nullptr;
    // Names the CPU's backend, which lives as long as this one. The self-test keeps the CPU's answers as hashes; where
    // one differs, that backend computes the case and the first differing element is named. Null as `check` is.
    void (*set_witness)(const Backend* cpu) = nullptr;
};

}  // namespace strata

// Each backend library exports this.
extern "C" const strata::Backend* strata_backend();
