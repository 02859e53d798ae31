// SPDX-License-Identifier: Apache-2.0

//! A real kernel, in namespaces of their own.
