// The CPU's answers to the self-test's cases: what the hashes are made of, and what is put in the place of kernels that
// a test does not run.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/selftest_cases.hpp"
#include "cpu/read.hpp"

namespace strata::test {

struct alignas(16) Block {
    unsigned char bytes[16];
};

// `count` values on a 16-byte boundary.
template <class T>
struct Buffer {
    std::vector<Block> blocks;
    explicit Buffer(std::int64_t count = 0)
        : blocks((static_cast<std::size_t>(count) * sizeof(T) + sizeof(Block) - 1) / sizeof(Block)) {}
    T* data() { return reinterpret_cast<T*>(blocks.data()); }
    const T* data() const { return reinterpret_cast<const T*>(blocks.data()); }
};

struct SelftestAnswer {
    std::int64_t bytes[kSelftestOutputs];  // 0: not asked for
    Buffer<unsigned char> of[kSelftestOutputs];
};

class SelftestCpu {
  public:
    // Ends the program where there is no such path.
    SelftestAnswer read(const SelftestCase& c, const char* path) {
        SelftestAnswer answer;
        for (int i = 0; i < kSelftestOutputs; ++i) {
            answer.bytes[i] = selftest_output_bytes(c, i);
            answer.of[i] = Buffer<unsigned char>(answer.bytes[i]);
        }
        void* outputs[kSelftestOutputs] = {};
        for (int i = 0; i < kSelftestOutputs; ++i) {
            if (answer.bytes[i] != 0) outputs[i] = answer.of[i].data();
        }
        const SelftestInputs inputs{residual_.data(),       block_out_.data(),   residual_bf16_.data(),
                                    block_out_bf16_.data(), inject_prev_.data(), inject_prev_ties_.data(),
                                    w_norm_.data(),         w_down_.data(),      w_up_.data(),
                                    w_inject_.data()};
        const ReadArgs args = selftest_read_args(c, inputs, outputs, scratch_.data());
        Report report;
        if (!cpu::read(args, path, inline_for, &report)) {
            std::fprintf(stderr, "%s\n", report.text);
            std::exit(2);
        }
        return answer;
    }

  private:
    static void inline_for(std::int64_t begin, std::int64_t end, std::int64_t,
                           void (*body)(std::int64_t, std::int64_t, void*), void* context) {
        body(begin, end, context);
    }

    static Buffer<float> floats(SelftestInput input, std::int64_t count) {
        Buffer<float> made(count);
        for (std::int64_t i = 0; i < count; ++i) made.data()[i] = selftest_value(input, static_cast<std::uint64_t>(i));
        return made;
    }

    static Buffer<std::uint16_t> halves(SelftestInput input, std::int64_t count) {
        Buffer<std::uint16_t> made(count);
        for (std::int64_t i = 0; i < count; ++i) made.data()[i] = selftest_bf16(input, static_cast<std::uint64_t>(i));
        return made;
    }

    static constexpr Geometry kG = kModelGeometry;
    Buffer<float> residual_ = floats(SelftestInput::Residual, kMaxTokens* kG.depth());
    Buffer<float> block_out_ = floats(SelftestInput::BlockOut, kMaxTokens* kG.width);
    Buffer<std::uint16_t> residual_bf16_ = halves(SelftestInput::Residual, kMaxTokens* kG.depth());
    Buffer<std::uint16_t> block_out_bf16_ = halves(SelftestInput::BlockOut, kMaxTokens* kG.width);
    Buffer<float> inject_prev_ = floats(SelftestInput::InjectPrev, kMaxTokens* kG.streams);
    Buffer<float> inject_prev_ties_ = floats(SelftestInput::InjectPrevTies, kMaxTokens* kG.streams);
    Buffer<float> w_norm_ = floats(SelftestInput::WNorm, kG.depth());
    Buffer<std::uint16_t> w_down_ = halves(SelftestInput::WDown, kG.rank* kG.depth());
    Buffer<std::uint16_t> w_up_ = halves(SelftestInput::WUp, kG.rank* kG.depth());
    Buffer<std::uint16_t> w_inject_ = halves(SelftestInput::WInject, kG.streams* kG.depth());
    Buffer<unsigned char> scratch_{cpu::scratch_size(kG, kMaxTokens)};
};

}  // namespace strata::test
