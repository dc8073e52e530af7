# LibTorch through our own find module; see FindLibTorch.cmake for where it looks.
set(SIRTAKI_HAVE_TORCH OFF)
if(SIRTAKI_TORCH STREQUAL "OFF")
  set(sirtaki_torch_status "off: SIRTAKI_TORCH=OFF")
else()
  find_package(LibTorch 2.1 QUIET)
  if(LibTorch_FOUND)
    set(SIRTAKI_HAVE_TORCH ON)
    set(sirtaki_torch_status "${LibTorch_BUILD}, ${LibTorch_ROOT_DIR}")
  elseif(SIRTAKI_TORCH STREQUAL "ON")
    message(FATAL_ERROR "SIRTAKI_TORCH=ON, but ${LibTorch_WHY_NOT}. 'bash bootstrap.sh' installs one into .venv, or "
      "give your own in CMAKE_PREFIX_PATH (an unpacked libtorch, or torch.utils.cmake_prefix_path).")
  else()
    set(sirtaki_torch_status "off: ${LibTorch_WHY_NOT}")
  endif()
endif()

# Under a sanitizer most of the compiler's time goes into instrumented copies of LibTorch's templates; optimising them
# costs a third of it and buys nothing, for LibTorch's own library is as it is.
function(sirtaki_sanitize_quickly target)
  if(SIRTAKI_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  endif()
endfunction()

# LibTorch's headers, parsed once for many sources. GCC instantiates whatever templates a precompiled header leaves open
# anew in every source that uses it, so what is in there costs each of them time: a source of 26 lines takes 10 s with
# <torch/torch.h>, 4 s with the narrow headers that the library includes.
#
# sirtaki_precompile_torch(<library>): the library's own, frameworks/torch/pch.h.
# sirtaki_use_library_pch(<target>): the same, for programs that come with the library.
# sirtaki_use_torch_pch(<target>): the whole of <torch/torch.h>, for tests, many of which include that.
function(sirtaki_precompile_torch library)
  sirtaki_sanitize_quickly(${library})
  if(SIRTAKI_PCH AND NOT SIRTAKI_CLANG_TIDY)
    target_compile_definitions(${library} PRIVATE ${sirtaki_mpi_macros})   # the compiler compares all macros
    target_precompile_headers(${library} PRIVATE "${PROJECT_SOURCE_DIR}/frameworks/torch/pch.h")
  endif()
endfunction()

# sirtaki_reuse_pch(<target> <owner>): the compiler refuses a precompiled header whose macros and flags are not the target's.
function(sirtaki_reuse_pch target owner)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_definitions(${target} PRIVATE ${sirtaki_mpi_macros})
  target_precompile_headers(${target} REUSE_FROM ${owner})
  target_compile_options(${target} PRIVATE -fPIC)   # a program's own would be -fPIE
endfunction()

function(sirtaki_use_library_pch target)
  sirtaki_sanitize_quickly(${target})
  if(SIRTAKI_PCH AND NOT SIRTAKI_CLANG_TIDY)
    sirtaki_reuse_pch(${target} sirtaki_torch)
  endif()
endfunction()

function(sirtaki_use_torch_pch target)
  sirtaki_sanitize_quickly(${target})
  if(NOT SIRTAKI_PCH OR SIRTAKI_CLANG_TIDY)
    return()
  endif()
  if(NOT TARGET sirtaki_torch_pch)
    file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/torch_pch.cc" CONTENT "// Here for its precompiled header.\n")
    add_library(sirtaki_torch_pch OBJECT "${PROJECT_BINARY_DIR}/torch_pch.cc")
    target_compile_features(sirtaki_torch_pch PUBLIC cxx_std_20)
    target_link_libraries(sirtaki_torch_pch PRIVATE sirtaki_flags LibTorch::LibTorch)
    target_compile_definitions(sirtaki_torch_pch PRIVATE ${sirtaki_mpi_macros})
    sirtaki_sanitize_quickly(sirtaki_torch_pch)
    target_precompile_headers(sirtaki_torch_pch PRIVATE <torch/torch.h>)
  endif()
  sirtaki_reuse_pch(${target} sirtaki_torch_pch)
endfunction()
