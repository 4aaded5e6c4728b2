#include "sim/memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "sim/watch.hpp"

namespace strata::sim {
namespace {

constexpr std::size_t kBoundary = 256;

std::size_t word_count(const Buffer& buffer) { return buffer.bytes / 4 + 2; }

}  // namespace

Memory::~Memory() {
    for (const auto& buffer : buffers_) {
        if (buffer->owned) std::free(buffer->begin);
    }
}

void* Memory::allocate(std::size_t bytes) {
    // Other bytes before and after, so that an access past the end meets no other piece.
    const std::size_t room = (bytes + kBoundary - 1) / kBoundary * kBoundary + kBoundary;
    if (room < bytes) return nullptr;
    void* memory = std::aligned_alloc(kBoundary, room);
    if (memory == nullptr) return nullptr;
    std::memset(memory, 0xcd, std::min<std::size_t>(room, 1 << 20));
    auto buffer = std::make_unique<Buffer>();
    buffer->name = "an allocation";
    buffer->begin = static_cast<char*>(memory);
    buffer->bytes = bytes;
    buffer->defined = false;
    buffer->owned = true;
    buffers_.push_back(std::move(buffer));
    return memory;
}

bool Memory::release(void* pointer) {
    const auto at = std::find_if(buffers_.begin(), buffers_.end(),
                                 [&](const auto& buffer) { return buffer->owned && buffer->begin == pointer; });
    if (at == buffers_.end()) return false;
    std::free(pointer);
    buffers_.erase(at);
    last_ = nullptr;
    return true;
}

void Memory::declare(const char* name, const void* begin, std::size_t bytes, bool writable, bool defined) {
    if (begin == nullptr || bytes == 0) return;
    auto buffer = std::make_unique<Buffer>();
    buffer->name = std::string("'") + name + "'";
    buffer->begin = static_cast<char*>(const_cast<void*>(begin));
    buffer->bytes = bytes;
    buffer->writable = writable;
    buffer->defined = defined;
    buffers_.push_back(std::move(buffer));
}

void Memory::withdraw_declared() {
    buffers_.erase(std::remove_if(buffers_.begin(), buffers_.end(), [](const auto& b) { return !b->owned; }),
                   buffers_.end());
    last_ = nullptr;
}

void Memory::define(const void* begin, std::size_t bytes) {
    if (!watch::kStrict) return;  // nobody asks
    Buffer* buffer = find(begin);
    if (buffer == nullptr || buffer->defined) return;
    const std::size_t offset = static_cast<std::size_t>(static_cast<const char*>(begin) - buffer->begin);
    if (offset == 0 && bytes >= buffer->bytes) {
        buffer->defined = true;
        return;
    }
    if (buffer->words == nullptr) buffer->words = std::make_unique<GlobalWord[]>(word_count(*buffer));
    for (std::size_t word = offset / 4; word < (offset + bytes + 3) / 4 && word < word_count(*buffer); ++word) {
        buffer->words[word].defined = true;
    }
}

Buffer* Memory::find(const void* address) {
    if (last_ != nullptr && last_->holds(address)) return last_;
    for (const auto& buffer : buffers_) {
        if (!buffer->holds(address)) continue;
        last_ = buffer.get();
        if (last_->writable && last_->words == nullptr)
            last_->words = std::make_unique<GlobalWord[]>(word_count(*last_));
        return last_;
    }
    return nullptr;
}

std::string Memory::describe(const void* address) const {
    const Buffer* below = nullptr;
    for (const auto& buffer : buffers_) {
        if (buffer->begin <= address && (below == nullptr || buffer->begin > below->begin)) below = buffer.get();
    }
    if (below == nullptr) return "below every buffer of the launch";
    const auto past = static_cast<const char*>(address) - (below->begin + below->bytes);
    return std::to_string(past) + " bytes past the end of " + below->name + " (" + std::to_string(below->bytes) +
           " bytes)";
}

std::size_t Memory::allocations() const {
    return static_cast<std::size_t>(
        std::count_if(buffers_.begin(), buffers_.end(), [](const auto& buffer) { return buffer->owned; }));
}

}  // namespace strata::sim
