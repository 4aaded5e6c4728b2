// The host side of the simulated cards: devices, streams, events, memory and launches, as a vendor's runtime has them.
//
// Each opened card is a device. Calls return the error code of the current device's vendor, 0 for success, and set the
// calling thread's pending error. Work on a stream happens when something waits for it and not before, so what a
// program forgets to wait for is not there; what a kernel did wrong is then the code of that call and of every later
// one. A code can be planted at any call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/fused_gr_policy.hpp"
#include "sim/executor.hpp"

namespace strata::sim {

enum class Call {
    CountDevices,
    SetDevice,
    Properties,
    Attribute,
    Preload,
    Malloc,
    Free,
    Memset,
    Memcpy,
    StreamCreate,
    StreamSync,
    StreamDestroy,
    StreamQuery,
    EventCreate,
    EventRecord,
    EventSync,
    EventDestroy,
    Launch,
};
inline constexpr const char* kCallNames[] = {
    "count_devices", "set_device",   "properties",   "attribute",     "preload",       "malloc",
    "free",          "memset",       "memcpy",       "stream_create", "stream_sync",   "stream_destroy",
    "stream_query",  "event_create", "event_record", "event_sync",    "event_destroy", "launch",
};

struct StreamState;
struct EventState;
using Stream = StreamState*;  // null: the current device's default stream
using Event = EventState*;

// ---------------------------------------------------------------------------------------------------------------------
// What a vendor's runtime has

GrBackend vendor();  // of the current device
const char* error_name(int code);
const char* error_text(int code);  // where a kernel's fault is the reason, it says which
int pending_error();
int take_error();

int count_devices(int* count);
int get_device(int* device);
int set_device(int device);
int device_card(int device, Card* card);

int set_shared_limit(const void* kernel, std::size_t bytes);
int preload(const void* kernel);

int device_allocate(void** out, std::size_t bytes);
int device_free(void* pointer);
int fill_bytes(void* to, int byte, std::size_t bytes, Stream stream);
int copy_bytes(void* to, const void* from, std::size_t bytes, Stream stream);  // either side may be the host's

int stream_create(Stream* out);  // which waits for no other stream
int stream_synchronize(Stream stream);
int stream_destroy(Stream stream);
int event_create(Event* out);
int event_record(Event event, Stream stream);
int event_synchronize(Event event);
int event_elapsed_ms(float* out, Event from, Event to);
int event_destroy(Event event);

// `launch.arguments` are copied.
int launch(Launch launch, std::size_t argument_bytes, Stream stream);

enum class CaptureMode { Global, ThreadLocal, Relaxed };
CaptureMode exchange_capture_mode(CaptureMode mode);  // of the calling thread
int stream_is_capturing(Stream stream, bool* out);
int begin_capture(Stream stream, CaptureMode mode);
int end_capture(Stream stream, std::size_t* launches);  // what was captured is dropped

// ---------------------------------------------------------------------------------------------------------------------
// What only a simulated card has

// A new device, which becomes the last one; its number, or -1 with a sentence.
int open_card(const char* name, std::uint64_t seed, std::string* problem);

// Memory of the caller that kernels on `device` may use until `withdraw`.
void declare(int device, const char* name, const void* begin, std::size_t bytes, bool writable, bool defined);
void withdraw(int device);

void plant(Call call, long nth, int code);  // the nth call from now on gives `code`; nth 0 takes all plants away
long calls(Call call);                      // made so far
void set_pending(int code);                 // an error that another library left behind
long live_allocations();
long live_streams();
long live_events();
void trace(const char* path);  // every call, as a line of this file; null ends it

// Every call that a plant can meet is told to `listener` before it does anything, with the kernel and the stream that
// it names; null ends it. The listener makes no call itself.
struct CallSeen {
    Call call;
    const void* kernel;
    Stream stream;
};
void tell_calls(void (*listener)(const CallSeen&));

// Instead of any kernel `stand_in` runs, on the host, at the time and with the arguments of the launch; null: kernels
// run again. It makes no call itself.
void replace_kernels(void (*stand_in)(const Launch& launch, std::size_t argument_bytes));

}  // namespace strata::sim
