# The installed torch as the target strata_torch: headers and libtorch_cpu, nothing else. (find_package(Torch) would look
# for a CUDA toolkit, and put flags of its own choice into the build.)
strata_facts(facts torch_facts.py)
string(REPLACE "\n" ";" facts "${facts}")
foreach(fact IN LISTS facts)
  if(fact MATCHES "^([a-z]+)=(.*)$")
    set(STRATA_TORCH_${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
  endif()
endforeach()
message(STATUS "torch ${STRATA_TORCH_version} of ${Python_EXECUTABLE}")

add_library(strata_torch INTERFACE)
target_include_directories(strata_torch SYSTEM INTERFACE ${STRATA_TORCH_include})
# The stable ABI as of torch 2.11: a library that keeps to it loads in every later torch.
target_compile_definitions(strata_torch INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
target_link_libraries(strata_torch INTERFACE ${STRATA_TORCH_library})
