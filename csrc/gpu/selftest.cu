// The self-test: every variant computes the same cases, and their bytes are compared; plain's with what the CPU says.
//
// An error that leaves the device usable costs what it touches: the candidate alone, or the whole check. Any other one
// ends the process, before anything else is asked of the runtime.
#include "gpu/vendor.hpp"  // first: it brings the device side of the maths functions

#include <cstring>
#include <exception>
#include <vector>

#include "common/launch_plan.hpp"
#include "common/selftest_cases.hpp"
#include "common/selftest_hashes.hpp"
#include "gpu/selftest.hpp"

namespace strata::gpu {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Inputs, made on the device.

struct FillArgs {
    SelftestInput input;
    std::int64_t count;
    float* floats;          // one of the two is null
    std::uint16_t* halves;  // bf16
};

constexpr int kFillThreads = 256;
constexpr int kFillBlocks = 256;

// Elements `i`, `i` + `step`, ... of an input.
STRATA_HOST_DEVICE void fill_elements(const FillArgs& args, std::int64_t i, std::int64_t step) {
    for (; i < args.count; i += step) {
        const auto index = static_cast<std::uint64_t>(i);
        if (args.floats != nullptr) {
            args.floats[i] = selftest_value(args.input, index);
        } else {
            args.halves[i] = selftest_bf16(args.input, index);
        }
    }
}

__global__ void __launch_bounds__(kFillThreads) gr_selftest_fill_kernel(FillArgs args) {
    fill_elements(args, std::int64_t{blockIdx.x} * kFillThreads + threadIdx.x,
                  std::int64_t{kFillThreads} * kFillBlocks);
}

// ---------------------------------------------------------------------------------------------------------------
// Memory: one allocation, cut into pieces with a gap behind each.

constexpr std::size_t kGap = 256;

constexpr std::size_t piece_size(std::size_t bytes) { return (bytes + kGap - 1) / kGap * kGap + kGap; }

constexpr std::size_t float_bytes(std::int64_t count) { return static_cast<std::size_t>(count) * sizeof(float); }

struct Output {
    const char* name;
    std::size_t offset;  // from the first output
    std::size_t bytes;   // 0: not asked for
};

// The outputs of a case, one behind the other in a block that starts with a gap of its own: the scratch's.
struct Outputs {
    Output list[kSelftestOutputs];
    std::size_t bytes;

    explicit Outputs(const SelftestCase& c) {
        bytes = kGap;
        for (int i = 0; i < kSelftestOutputs; ++i) {
            list[i] = {kSelftestOutputNames[i], bytes, static_cast<std::size_t>(selftest_output_bytes(c, i))};
            bytes += piece_size(list[i].bytes);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------

// Two sides are poisoned differently, so that an output that neither writes is a difference.
constexpr int kPoisonReference = 0xa5;
constexpr int kPoisonCandidate = 0x5a;

using Bytes = std::vector<unsigned char>;

struct alignas(kGap) Aligned {
    unsigned char bytes[kGap];
};

std::uint32_t word_at(const Bytes& bytes, std::size_t offset) {
    std::uint32_t word;
    std::memcpy(&word, bytes.data() + offset, sizeof word);
    return word;
}

class Selftest {
  public:
    Selftest(const SelftestRequest& request, Report* report) : request_(request), report_(report) {}

    SelftestResult run() {
        Gates& gates = result_.gates;
        gates.plain = gates.split = gates.staged = gates.wide_up = gates.runtime_geometry = gates.tiled = true;
        candidate_alive_ = request_.candidate != kNoVariant;
        bool completed = open();
        for (int i = 0; completed && i < kSelftestCases; i += request_.case_stride) completed = run_case(i);
        const bool candidate_ok = close(&completed) && candidate_equal_;
        gates.p4 = candidate_ok && request_.candidate == kHcRegisterHalf;
        gates.stream = candidate_ok && request_.candidate == kHcStream;
        gates.state = completed ? CheckState::Completed : CheckState::NotCompleted;
        if (!completed) gates = {CheckState::NotCompleted};
        return result_;
    }

  private:
    enum class Scope { Shared, Candidate };

    // Notes a runtime call's error. Returns whether there was none.
    bool call(int code, const char* what, Scope scope = Scope::Shared) {
        if (code == 0) return true;
        end_if_fatal(code, what, request_.device);
        take_error();
        if (scope == Scope::Candidate) {
            candidate_alive_ = false;
            std::snprintf(result_.candidate_error, sizeof result_.candidate_error, "%s gave %s (%d)", what,
                          error_name(code), code);
        } else if (report_->code == 0) {  // the first one is the reason
            report_->code = code;
            report_->say("the self-test of %s:%d did not complete: %s gave %s (%d): %s", kBackendName, request_.device,
                         what, error_name(code), code, error_text(code));
        }
        return false;
    }

    bool open() {
        const Geometry& g = kModelGeometry;
        const SelftestCase largest{kMaxTokens, StreamType::Float32, true, true, true};
        const std::size_t output_bytes = Outputs(largest).bytes;
        const std::size_t scratch = static_cast<std::size_t>(scratch_bytes(g, kMaxTokens));
        const std::size_t weights = static_cast<std::size_t>(g.rank * g.depth()) * sizeof(std::uint16_t);
        const std::size_t inject = static_cast<std::size_t>(g.streams * g.depth()) * sizeof(std::uint16_t);
        const std::size_t sizes[] = {float_bytes(kMaxTokens * g.depth()),
                                     float_bytes(kMaxTokens * g.width),
                                     float_bytes(kMaxTokens * g.depth()) / 2,
                                     float_bytes(kMaxTokens * g.width) / 2,
                                     float_bytes(kMaxTokens * g.streams),
                                     float_bytes(kMaxTokens * g.streams),
                                     float_bytes(g.depth()),
                                     weights,
                                     weights,
                                     inject,
                                     scratch + output_bytes};
        for (const std::size_t size : sizes) memory_bytes_ += piece_size(size);
        void* memory = nullptr;
        if (!call(device_allocate(&memory, memory_bytes_), "allocating memory")) return false;
        memory_ = static_cast<char*>(memory);
        std::size_t at = 0;
        const auto take = [&](std::size_t bytes) {
            char* piece = memory_ + at;
            at += piece_size(bytes);
            return piece;
        };
        inputs_.residual = reinterpret_cast<float*>(take(sizes[0]));
        inputs_.block_out = reinterpret_cast<float*>(take(sizes[1]));
        inputs_.residual_bf16 = reinterpret_cast<std::uint16_t*>(take(sizes[2]));
        inputs_.block_out_bf16 = reinterpret_cast<std::uint16_t*>(take(sizes[3]));
        inputs_.inject_prev = reinterpret_cast<float*>(take(sizes[4]));
        inputs_.inject_prev_ties = reinterpret_cast<float*>(take(sizes[5]));
        inputs_.w_norm = reinterpret_cast<float*>(take(sizes[6]));
        inputs_.w_down = reinterpret_cast<std::uint16_t*>(take(sizes[7]));
        inputs_.w_up = reinterpret_cast<std::uint16_t*>(take(sizes[8]));
        inputs_.w_inject = reinterpret_cast<std::uint16_t*>(take(sizes[9]));
        scratch_ = take(sizes[10]);
        outputs_ = scratch_ + scratch;  // the first gap stands between them

        if (!call(stream_create(&stream_), "creating the reference stream")) return false;
        stream_open_ = true;
        if (candidate_alive_) {
            candidate_stream_open_ =
                call(stream_create(&candidate_stream_), "creating the candidate's stream", Scope::Candidate);
        }
        return fill(SelftestInput::Residual, inputs_.residual, kMaxTokens * g.depth()) &&
               fill(SelftestInput::BlockOut, inputs_.block_out, kMaxTokens * g.width) &&
               fill(SelftestInput::Residual, inputs_.residual_bf16, kMaxTokens * g.depth()) &&
               fill(SelftestInput::BlockOut, inputs_.block_out_bf16, kMaxTokens * g.width) &&
               fill(SelftestInput::InjectPrev, inputs_.inject_prev, kMaxTokens * g.streams) &&
               fill(SelftestInput::InjectPrevTies, inputs_.inject_prev_ties, kMaxTokens * g.streams) &&
               fill(SelftestInput::WNorm, inputs_.w_norm, g.depth()) &&
               fill(SelftestInput::WDown, inputs_.w_down, g.rank * g.depth()) &&
               fill(SelftestInput::WUp, inputs_.w_up, g.rank * g.depth()) &&
               fill(SelftestInput::WInject, inputs_.w_inject, g.streams * g.depth()) &&
               call(stream_synchronize(stream_), "making the inputs");
    }

    // Everything is given back whatever happened before. Returns whether the candidate's stream ended well.
    bool close(bool* completed) {
        if (candidate_stream_open_) {
            const bool drained =
                call(stream_synchronize(candidate_stream_), "the candidate's last synchronisation", Scope::Candidate);
            const bool destroyed =
                call(stream_destroy(candidate_stream_), "destroying the candidate's stream", Scope::Candidate);
            candidate_alive_ = candidate_alive_ && drained && destroyed;
        }
        if (stream_open_) {
            *completed &= call(stream_synchronize(stream_), "the reference's last synchronisation");
            *completed &= call(stream_destroy(stream_), "destroying the reference stream");
        }
        if (memory_ != nullptr) *completed &= call(device_free(memory_), "freeing memory");
        return candidate_alive_;
    }

    bool fill(SelftestInput input, float* target, std::int64_t count) { return fill({input, count, target, nullptr}); }
    bool fill(SelftestInput input, std::uint16_t* target, std::int64_t count) {
        return fill({input, count, nullptr, target});
    }
    bool fill(const FillArgs& args) {
        fills_.push_back(args);
        return call(launch(gr_selftest_fill_kernel, dim3(kFillBlocks), kFillThreads, 0, stream_, args),
                    "launching gr_selftest_fill_kernel");
    }

    // The read of a case whose outputs lie from `first_output` on.
    static ReadArgs read_args(const SelftestCase& c, const Outputs& outputs, const SelftestInputs& inputs,
                              char* first_output, void* scratch) {
        void* places[kSelftestOutputs] = {};
        for (int i = 0; i < kSelftestOutputs; ++i) {
            if (outputs.list[i].bytes != 0) places[i] = first_output + outputs.list[i].offset;
        }
        return selftest_read_args(c, inputs, places, scratch);
    }

    // One read of a case into the output block, and the block to the host.
    bool read(const SelftestCase& c, const Outputs& outputs, int variant, int q8_columns, int poison, Bytes* host) {
        const bool candidate = variant == request_.candidate;
        const Scope scope = candidate ? Scope::Candidate : Scope::Shared;
        const Stream stream = candidate ? candidate_stream_ : stream_;
        const std::size_t scratch = static_cast<std::size_t>(outputs_ - scratch_);
        if (!call(fill_bytes(scratch_, poison, scratch + outputs.bytes, stream), "poisoning the outputs", scope)) {
            return false;
        }
        Report launch_report;
        const ReadArgs args = read_args(c, outputs, inputs_, outputs_, scratch_);
        if (!fused_gr_read_multi(args, variant, q8_columns, request_.limits, stream, &launch_report)) {
            return call(launch_report.code, "launching a read", scope);
        }
        host->resize(outputs.bytes);
        return call(copy_to_host(host->data(), outputs_, outputs.bytes, stream), "reading back", scope) &&
               call(stream_synchronize(stream), "waiting for a read", scope);
    }

    // The gaps between the outputs still hold the poison.
    static bool gaps_intact(const Bytes& host, const Outputs& outputs, int poison, CheckLine* line) {
        std::size_t at = 0;
        for (int i = 0; i <= kSelftestOutputs; ++i) {
            const std::size_t end = i < kSelftestOutputs ? outputs.list[i].offset : outputs.bytes;
            for (; at < end; ++at) {
                if (host[at] == poison) continue;
                line->output = "memory between the outputs";
                line->index = static_cast<std::int64_t>(at / sizeof(std::uint32_t));
                line->expected = static_cast<std::uint32_t>(poison) * 0x01010101u;
                line->got = word_at(host, at / sizeof(std::uint32_t) * sizeof(std::uint32_t));
                return false;
            }
            if (i < kSelftestOutputs) at += outputs.list[i].bytes;
        }
        return true;
    }

    static bool same_bytes(const Bytes& expected, const Bytes& got, const Outputs& outputs, CheckLine* line) {
        for (const Output& output : outputs.list) {
            if (std::memcmp(expected.data() + output.offset, got.data() + output.offset, output.bytes) == 0) continue;
            for (std::size_t at = 0; at < output.bytes; at += sizeof(std::uint32_t)) {
                line->expected = word_at(expected, output.offset + at);
                line->got = word_at(got, output.offset + at);
                if (line->expected == line->got) continue;
                line->output = output.name;
                line->index = static_cast<std::int64_t>(at / sizeof(std::uint32_t));
                return false;
            }
        }
        return true;
    }

    static bool same_hashes(const Bytes& got, const Outputs& outputs, int index, CheckLine* line) {
        for (int i = 0; i < kSelftestOutputs; ++i) {
            const Output& output = outputs.list[i];
            std::uint64_t hash = kSelftestHashStart;
            for (std::size_t at = 0; at < output.bytes; at += sizeof(std::uint32_t)) {
                hash = selftest_hash(hash, word_at(got, output.offset + at));
            }
            if (output.bytes == 0 || hash == kSelftestHashes[index][i]) continue;
            line->output = output.name;
            return false;
        }
        return true;
    }

    // The host's copy of the device's memory: where it keeps what a pointer means there.
    template <class T>
    T* on_host(T* there) {
        if (there == nullptr) return nullptr;
        const auto offset = reinterpret_cast<const char*>(there) - memory_;
        return reinterpret_cast<T*>(reinterpret_cast<char*>(host_memory_.data()) + offset);
    }

    // The CPU computes the case from inputs made on the host; false where it cannot.
    bool read_on_cpu(const SelftestCase& c, const Outputs& outputs, Bytes* host) {
        if (host_memory_.empty()) {
            host_memory_.resize(memory_bytes_ / sizeof(Aligned));
            for (FillArgs fill : fills_) {
                fill.floats = on_host(fill.floats);
                fill.halves = on_host(fill.halves);
                fill_elements(fill, 0, 1);
            }
        }
        const std::int64_t scratch_size = request_.cpu->scratch_size(&kModelGeometry, c.tokens);
        std::vector<Aligned> scratch(static_cast<std::size_t>(scratch_size) / sizeof(Aligned) + 1);
        const SelftestInputs inputs{on_host(inputs_.residual),      on_host(inputs_.block_out),
                                    on_host(inputs_.residual_bf16), on_host(inputs_.block_out_bf16),
                                    on_host(inputs_.inject_prev),   on_host(inputs_.inject_prev_ties),
                                    on_host(inputs_.w_norm),        on_host(inputs_.w_down),
                                    on_host(inputs_.w_up),          on_host(inputs_.w_inject)};
        const ReadArgs args = read_args(c, outputs, inputs, on_host(outputs_), scratch.data());
        const ReadChoice choice;
        Report ignored;
        try {
            if (!request_.cpu->read(&args, &choice, 0, nullptr, &ignored)) return false;
        } catch (const std::exception&) {  // torch's thread pool failed
            return false;
        }
        const char* answer = on_host(outputs_);
        host->assign(answer, answer + outputs.bytes);
        return true;
    }

    // Names the first element in which plain's answer, whose hash is wrong, differs from the CPU's. Its answer counts
    // where it has the table's hashes: the library at hand may be another version.
    void name_element(const SelftestCase& c, const Outputs& outputs, int index, CheckLine* line) {
        CheckLine whole = *line;
        if (request_.cpu == nullptr || !read_on_cpu(c, outputs, &other_)) return;
        if (same_hashes(other_, outputs, index, &whole)) same_bytes(other_, plain_, outputs, line);
    }

    void report_line(const CheckLine& line) const {
        if (request_.visit != nullptr) request_.visit(&line, request_.context);
    }

    static CheckLine blank_line(const SelftestCase& c, int variant, int q8_columns, const char* against) {
        return {c.tokens,   c.stream_type, c.fold, c.inject, c.q8_1, fused_gr_find(variant)->name,
                q8_columns, against,       true,   "",       0,      0,
                0};
    }

    // Another variant's answer against `expected`. False only where the check cannot go on.
    bool compare(const SelftestCase& c, const Outputs& outputs, int variant, int q8_columns, const Bytes& expected,
                 const char* against, bool* equal, Bytes* host) {
        if (!read(c, outputs, variant, q8_columns, kPoisonCandidate, host)) return false;
        CheckLine line = blank_line(c, variant, q8_columns, against);
        line.equal =
            gaps_intact(*host, outputs, kPoisonCandidate, &line) && same_bytes(expected, *host, outputs, &line);
        *equal &= line.equal;
        report_line(line);
        return true;
    }

    bool run_case(int index) {
        const SelftestCase c = selftest_case(index);
        const Outputs outputs(c);
        Gates& gates = result_.gates;

        if (!read(c, outputs, kHcPlain, kUpNarrow, kPoisonReference, &plain_)) return false;
        CheckLine line = blank_line(c, kHcPlain, kUpNarrow, "cpu");
        line.equal =
            gaps_intact(plain_, outputs, kPoisonReference, &line) && same_hashes(plain_, outputs, index, &line);
        if (!line.equal && line.expected == line.got) name_element(c, outputs, index, &line);
        if (!line.equal && gates.plain) {
            char element[64] = "";
            if (line.expected != line.got) {
                std::snprintf(element, sizeof element, " (word %lld is 0x%08x, not 0x%08x)",
                              static_cast<long long>(line.index), line.got, line.expected);
            }
            std::snprintf(result_.first_difference, sizeof result_.first_difference,
                          "%s of case T=%d %s fold=%d inject=%d q8_1=%d%s", line.output, c.tokens,
                          stream_name(c.stream_type), c.fold, c.inject, c.q8_1, element);
        }
        gates.plain &= line.equal;
        report_line(line);

        if (!compare(c, outputs, kHcSplit, kUpNarrow, plain_, "plain", &gates.split, &other_) ||
            !compare(c, outputs, kHcRuntimeGeometry, kUpNarrow, plain_, "plain", &gates.runtime_geometry, &other_) ||
            !compare(c, outputs, kHcTiled, kUpNarrow, plain_, "plain", &gates.tiled, &other_) ||
            !compare(c, outputs, kHcTiledFew, kUpNarrow, plain_, "plain", &gates.tiled, &other_)) {
            return false;
        }
        if (c.q8_1 && (!compare(c, outputs, kHcPlain, kUpWide, plain_, "plain", &gates.wide_up, &other_) ||
                       !compare(c, outputs, kHcStaged, kUpWide, plain_, "plain", &gates.staged, &other_))) {
            return false;
        }
        if (!compare(c, outputs, kHcStaged, kUpNarrow, plain_, "plain", &gates.staged, &staged_)) return false;

        for (const int columns : {kUpNarrow, kUpWide}) {
            if (!candidate_alive_ || (columns == kUpWide && !c.q8_1)) continue;
            // A failure here costs the candidate alone.
            if (request_.candidate == kHcRegisterHalf) {
                compare(c, outputs, kHcRegisterHalf, columns, staged_, "staged", &candidate_equal_, &other_);
            } else if (columns == kUpNarrow) {  // it has an up kernel of its own
                compare(c, outputs, request_.candidate, columns, plain_, "plain", &candidate_equal_, &other_);
            }
        }
        return true;
    }

    SelftestRequest request_;
    Report* report_;
    SelftestResult result_;
    bool candidate_alive_ = false;
    bool candidate_equal_ = true;

    char* memory_ = nullptr;
    std::size_t memory_bytes_ = 0;
    std::vector<FillArgs> fills_;
    std::vector<Aligned> host_memory_;  // empty until it is needed
    SelftestInputs inputs_{};
    char* scratch_ = nullptr;
    char* outputs_ = nullptr;
    Stream stream_{};
    Stream candidate_stream_{};
    bool stream_open_ = false;
    bool candidate_stream_open_ = false;
    Bytes plain_, staged_, other_;
};

}  // namespace

SelftestResult fused_gr_selftest(const SelftestRequest& request, Report* report) {
    return Selftest(request, report).run();
}

}  // namespace strata::gpu
